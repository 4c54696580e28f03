"""Everything that the README shows is true: its Python runs, its commands work, its folders exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcanary_tools.pages import figures

README = Path(__file__).resolve().parents[2] / "README.md"


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def shown_commands(program: str) -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return [words[1:] for line in lines if (words := shlex.split(line[2:]))[0] == program]


def test_python_runs_and_prints(root: Path) -> None:
    """The Python example runs as it stands and says what it promises."""
    [code] = blocks("python")
    child = run(root, sys.executable, "-c", code)
    assert child.returncode == 0, child.stderr
    assert "tokens a forward" in child.stdout
    assert "slots checked" in child.stdout


@pytest.mark.parametrize("arguments", shown_commands("kvcanary"), ids=" ".join)
def test_command_works(root: Path, arguments: list[str]) -> None:
    """Each command line ends clean."""
    child = subprocess.run(
        [sys.executable, "-m", "kvcanary_tools", *arguments], cwd=root, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip()


@pytest.mark.parametrize("arguments", shown_commands("make"), ids=" ".join)
def test_make_target_exists(root: Path, arguments: list[str]) -> None:
    """Each make line names a target, and its variables reach pip."""
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", *arguments], cwd=root, capture_output=True, text=True
    )
    assert planned.returncode == 0, planned.stderr
    for argument in arguments:
        if argument.startswith("PIP_ARGS="):
            assert argument.removeprefix("PIP_ARGS=") in planned.stdout


def test_folders_of_the_map_exist(root: Path) -> None:
    """The map names real folders, and every package is on it."""
    named = re.findall(r"^\| `([\w/]+)/` \|", README.read_text(), re.MULTILINE)
    assert {"kernels/kvcanary_kernels", "kvcanary", "spec_engine", "tools/kvcanary_tools", "tests"} <= set(named)
    assert all((root / folder).is_dir() for folder in named)


def test_links_lead_somewhere(root: Path) -> None:
    """Relative links point at files that exist."""
    for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", README.read_text()):
        assert (root / target.partition("#")[0]).exists(), target


def test_codes_are_the_canary_s(root: Path) -> None:
    """The table lists every check of this version, and no other."""
    from kvcanary.codes import FED

    table = README.read_text().partition("## What does it check?")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ") and "code" not in line]
    assert {code.strip() for row in rows for code in row.split(",")} == FED


def test_report_is_what_the_demo_prints() -> None:
    """The report of the flipped bit is the one that `kvcanary demo` prints today; numbers may differ by machine."""
    from kvcanary_tools.commands.demo import NUM_TOKENS
    from kvcanary_tools.runs.demonstration import flip_bit, strike
    from spec_engine.models.embedded import load_excerpts

    shown = blocks("text")[0]
    outcome = strike(load_excerpts()[0].prompt, NUM_TOKENS, flip_bit)
    assert outcome.report is not None
    assert without_numbers(shown.strip()) == without_numbers(outcome.report.text().strip())


def without_numbers(text: str) -> list[str]:
    return [re.sub(r"0x[0-9a-f]+|-?\d+(\.\d+)?(e-?\d+)?", "#", line.rstrip()) for line in text.splitlines()]


def test_readme_shows_what_two_minutes_print(root: Path) -> None:
    """The lines of `kvcanary bench quick` are those of its record."""
    from kvcanary_tools.bench import quick

    results = root / "tools" / "kvcanary_tools" / "bench" / "results"
    quick_record = json.loads((results / "gpu_quick.json").read_text(encoding="utf-8"))
    shown = blocks("text")[1].splitlines()
    assert shown == [line for line in quick.lines(quick_record) if line.startswith(("overhead", "accuracy"))]


@pytest.mark.parametrize(("page", "lines"), [(figures.README, figures.readme), (figures.MEASURED, figures.measured)])
def test_figures_are_those_of_the_records(page: Path, lines: Callable[[], list[str]]) -> None:
    """Cost and speed stand there as the benchmark scripts wrote them."""
    assert "\n".join((figures.BEGIN, *lines(), figures.END)) in page.read_text(encoding="utf-8")


def test_an_overhead_is_what_is_added(root: Path) -> None:
    """A ratio of 1.0452 in the record is +4.5 % in the README, on the line of its case."""
    record = root / "tools" / "kvcanary_tools" / "bench" / "results" / "gpu_prefill.json"
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    [row] = [row for row in rows if (row["requests"], row["tokens"]) == (64, 4032)]
    [line] = [line for line in README.read_text(encoding="utf-8").splitlines() if "prefill, 8B shape, 64" in line]
    added = 100 * row["over_off"]["rolling"]["median"] - 100
    assert f"| {row['off_ms']:,.0f} ms | +{added:.1f} % (" in line
    assert [figures.percent(ratio) for ratio in (1.0, 0.9999, 1.004, 0.93)] == ["+0.0 %", "+0.0 %", "+0.4 %", "-7.0 %"]


def test_no_cell_has_more_than_five_numbers() -> None:
    """A table can be read: no lists of figures in one cell, but for ranges."""
    for page in (README, figures.MEASURED):
        for line in page.read_text(encoding="utf-8").splitlines():
            for cell in line.split(" | ") if line.startswith("| ") else ():
                shown = re.sub(r"\]\([^)]*\)|`[^`]*`|[A-Z]\d+", "", cell)
                assert len(re.findall(r"\d[\d,.]*", shown)) <= 5, cell


def test_the_engine_s_page_quotes_launches_of_a_chain(root: Path) -> None:
    """Launches that constants of a chain save, from the record."""
    record = root / "tools" / "kvcanary_tools" / "bench" / "results" / "gpu_chain.json"
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    first, second = ([row[way]["launches"] for way in ("chain", "general")] for row in rows)
    docs = (root / "docs" / "steps.md").read_text(encoding="utf-8")
    assert f"{first[0]} launches instead of {first[1]} at batch 1, {second[0]} instead of {second[1]}" in docs
