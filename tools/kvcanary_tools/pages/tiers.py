"""What faults in files came to: ``python -m kvcanary_tools.pages.tiers`` writes it into docs/tiers.md."""

from __future__ import annotations

import json
from pathlib import Path

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.pages.marks import put_between

PAGE = Path(__file__).parents[3] / "docs" / "tiers.md"
BEGIN, END = "<!-- tiers: begin -->", "<!-- tiers: end -->"


def written() -> str:
    """The record in a few lines of Markdown."""
    record = json.loads((RESULTS / "tier_files.json").read_text(encoding="utf-8"))
    lines = [
        f"{record['injections']:,} faults: {record['misses']} missed, {record['other_verdicts']} named wrongly, "
        f"{record['alarms']} findings in loads of the same files before the fault. "
        f"{record['clean_loads']:,} clean loads: {record['findings']} findings.",
        f"One core of {record['machine']['device']}: {record['gb_a_second_put']} GB/s sealed, "
        f"{record['gb_a_second_check']} GB/s compared, {record['gb_a_second_copy']} GB/s copied in memory.",
        "",
        "| fault | verdicts |",
        "|---|---|",
    ]
    verdicts: dict[str, list[str]] = {}
    for name, count in sorted(record["verdicts"].items()):
        fault, kind = name.split(": ")
        verdicts.setdefault(fault.replace("_", " "), []).append(f"{kind} {count}")
    return "\n".join([*lines, *(f"| {fault} | {', '.join(told)} |" for fault, told in verdicts.items())])


if __name__ == "__main__":
    put_between(PAGE, BEGIN, END, written().splitlines())
