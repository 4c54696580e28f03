"""What the pages say of the last full campaign: the matrix in docs/faults.md, its sums in the README, from its JSON.

`kvcanary inject all --config full --json tools/kvcanary_tools/campaign/results/full.json`, then
`python -m kvcanary_tools.campaign.pages` writes both. What dumps are worth, `campaign.dumps` has put beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcanary_tools.campaign.outcome.matrix import BEST
from kvcanary_tools.pages.marks import put_between

ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *("fault", "runs", "found", "not ended", "first by", "place", "writer", "steps", "leaked", "exposed"),
    *("twins", "off", "cause 1st"),
)
BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
Totals = Sequence[Mapping[str, Any]]


def matrix_lines(totals: Totals) -> Iterator[str]:
    """A line a fault, as Markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in totals:
        steps = row["steps_to_detection"]
        cells = (
            f"`{row['fault']}`",
            row["runs"],
            row["found"],
            row["not_ended"],
            row["first_code"] or "nobody",
            _share(row["place_right"], row["places"]),
            _share(row["writer_right"], row["writers"]),
            "-" if steps is None else f"{steps['median']:g}, {steps['max']:g}",
            row["tokens_leaked"],
            row["tokens_exposed"],
            f"{row['twin_findings']} of {row['twins']}",
            f"{row['disabled_found']} of {row['disabled']}",
            _share(row["verdict_first"], row["verdicts"]),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def summary_lines(campaign: Mapping[str, Any], dumps: Mapping[str, Any]) -> Iterator[str]:
    """The sums, as Markdown; `dumps`: what `campaign.dumps` has told."""
    totals, meta = campaign["totals"], campaign["meta"]

    def of(part: str, whole: str) -> str:
        return f"{_sum(totals, part):,} of {_sum(totals, whole):,}"

    yield "| the full campaign | |"
    yield "|---|---|"
    yield f"| faults, each in up to {meta['num_configs']} configurations | {len(totals)} |"
    counts = [row["runs"] for row in totals]
    yield f"| runs per fault, least and most | {min(counts)} and {max(counts)} |"
    yield f"| fault runs stopped by the expected check | {of('found', 'runs')} |"
    yield f"| runs that reached their time limit, none of them counted as found | {_sum(totals, 'not_ended')} |"
    yield f"| right slot named; right writer named | {of('place_right', 'places')}; {of('writer_right', 'writers')} |"
    yield f"| tokens returned in or after the step of the finding | {_sum(totals, 'tokens_leaked'):,} |"
    yield f"| runs that returned tokens before the finding where none may be returned | {of('too_exposed', 'runs')} |"
    clean = meta["num_runs"]["clean"]
    controls = f"{meta['clean_findings']} of {clean:,}; {_quiet(campaign)}"
    yield f"| findings in control runs: without a fault; with a harmless change | {controls} |"
    yield f"| findings of a check that was switched off | {of('disabled_found', 'disabled')} |"
    first, best = (_share(_sum(totals, name), _sum(totals, "verdicts")) for name in ("verdict_first", "verdict_top3"))
    yield f"| right cause named first; among the first {BEST} | {first}; {best} |"
    worth, dumped = dumps["meta"], [row["dumps"] for row in dumps["rows"]]
    yield f"| dumps scored per fault, least and most | {min(dumped)} and {max(dumped)} |"
    yield f"| dumps in which `explain` names the right cause first | {worth['cause_first']:,} of {worth['dumps']:,} |"
    yield f"| dumps in which `replay` reproduces the finding | {worth['replayed']:,} of {worth['recorded']:,} |"
    yield f"| dumps of findings in recurrent states, which are not recorded | {worth['dumps'] - worth['recorded']:,} |"
    rerun = {name for each in meta.get("rerun", ()) for name in each["faults"]}
    yield f"| faults run later: new ones, or again after a fix to the fault or to a check | {len(rerun)} |"
    yield f"| minutes on 2 cores | {meta['cpu_seconds'] / 120:.0f} |"


def write_pages(campaign: Mapping[str, Any], dumps: Mapping[str, Any], root: Path = ROOT) -> None:
    """Put both tables between their marks; ValueError for a page without them."""
    for page, lines in pages(campaign, dumps).items():
        put_between(root / page, BEGIN, END, lines)


def pages(campaign: Mapping[str, Any], dumps: Mapping[str, Any]) -> dict[str, list[str]]:
    """By page, the lines between its marks."""
    sums = list(summary_lines(campaign, dumps))
    return {"docs/faults.md": [*sums, "", *matrix_lines(campaign["totals"])], "README.md": sums}


def load(name: str) -> dict[str, Any]:
    """A record: `full` of the last full campaign, `dumps` of what its dumps are worth."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _sum(totals: Totals, name: str) -> int:
    return sum(row[name] for row in totals)


def _quiet(campaign: Mapping[str, Any]) -> str:
    meta = campaign["meta"]
    return f"{meta['quiet_findings']} of {meta['num_runs'].get('quiet', 0):,}"


def _share(count: int, total: int) -> str:
    return "-" if not total else "100 %" if count == total else f"{100 * count / total:.1f} %"


if __name__ == "__main__":
    write_pages(load("full"), load("dumps"))
