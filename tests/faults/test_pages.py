"""What the pages say of the full campaign is what its record says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcanary.faults import catalogue
from kvcanary_tools.campaign import pages, runner
from kvcanary_tools.campaign.configurations import PLANS
from kvcanary_tools.campaign.dumps import missed
from kvcanary_tools.campaign.outcome.matrix import rows_of, totals_of
from kvcanary_tools.campaign.outcome.report import as_json

ROOT = Path(__file__).parents[2]
DUMPS = {
    "meta": {"dumps": 2000, "cause_first": 1990, "recorded": 1999, "replayed": 1998},
    "rows": [{"dumps": 19}, {"dumps": 20}],
}


@pytest.fixture(scope="module")
def campaign() -> dict:
    """A small one: a fault in the quick configurations, with all its twins."""
    planned = runner.runs_of([catalogue.find("hooks.wrong_substep")], PLANS["quick"], None, seed=1)
    results = list(runner.campaign(planned, workers=1))
    return as_json(rows_of(results), totals_of(results), results, cpu_seconds=600)


def test_a_line_a_fault_and_the_sums(campaign):
    """Counts as they are, shares in percent, minutes on two cores."""
    _, _, line = pages.matrix_lines(campaign["totals"])
    assert line == "| `hooks.wrong_substep` | 3 | 3 | 0 | HookOrderError | - | - | 1, 1 | 0 | 0 | 0 of 4 | 0 of 0 | - |"
    sums = dict(text.strip("| ").split(" | ") for text in list(pages.summary_lines(campaign, DUMPS))[2:])
    assert sums["faults, each in up to 3 configurations"] == "1"
    assert sums["findings in control runs: without a fault; with a harmless change"] == "0 of 3; 0 of 1"
    assert sums["runs that reached their time limit, none of them counted as found"] == "0"
    assert sums["minutes on 2 cores"] == "5"
    assert sums["dumps scored per fault, least and most"] == "19 and 20"
    assert sums["dumps in which `explain` names the right cause first"] == "1,990 of 2,000"
    assert sums["dumps in which `replay` reproduces the finding"] == "1,998 of 1,999"
    assert sums["dumps of findings in recurrent states, which are not recorded"] == "1"
    assert sums["faults run later: new ones, or again after a fix to the fault or to a check"] == "0"


def test_a_fault_run_again_twice_is_one(campaign):
    """The record says how many of its faults are younger than the rest."""
    again = [{"faults": ["hooks.wrong_substep", "bits.flip"]}, {"faults": ["bits.flip"]}]
    lines = list(pages.summary_lines(campaign | {"meta": campaign["meta"] | {"rerun": again}}, DUMPS))
    assert "| faults run later: new ones, or again after a fix to the fault or to a check | 2 |" in lines


def test_they_go_between_their_marks(campaign, tmp_path):
    """What stood there before is gone, what stands around stays; a page without marks is refused."""
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/faults.md"):
        (tmp_path / page).write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nbehind\n")
    pages.write_pages(campaign, DUMPS, tmp_path)
    text = (tmp_path / "docs/faults.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nbehind\n")
    assert "hooks.wrong_substep" in text
    assert "old" not in text
    pages.write_pages(campaign, DUMPS, tmp_path)
    assert (tmp_path / "docs/faults.md").read_text() == text
    (tmp_path / "README.md").write_text("no mark")
    with pytest.raises(ValueError, match="must have a line <!-- campaign: begin -->"):
        pages.write_pages(campaign, DUMPS, tmp_path)


@pytest.mark.parametrize("page", ["README.md", "docs/faults.md"])
def test_the_pages_quote_the_records(page):
    """The tables of both pages are those of the last full campaign, and of its dumps."""
    record, dumps = pages.load("full"), pages.load("dumps")
    assert record["meta"]["config"] == "full"
    text = "\n".join((pages.BEGIN, *pages.pages(record, dumps)[page], pages.END))
    assert text in (ROOT / page).read_text(encoding="utf-8")


def test_the_dumps_hold_their_bars():
    """The right cause first in 90 %, the same finding in every replay, of every fault that ends in a finding."""
    reported = pages.load("dumps")
    assert list(missed(reported)) == []
    assert {row["fault"] for row in reported["rows"]} <= {fault.name for fault in catalogue.faults()}
    assert sum(row["dumps"] for row in reported["rows"]) == reported["meta"]["dumps"]
