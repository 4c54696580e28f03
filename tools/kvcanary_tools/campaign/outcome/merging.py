"""A campaign whose record takes in a later one of some of its faults: their rows are replaced, and it says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvcanary_tools.campaign.outcome.matrix import Row

#: Of the later campaign, what `meta.rerun` lists.
REPORTED = ("kvcanary", "seed", "cpu_seconds", "num_runs", "clean_findings", "quiet_findings")
SUMS = ("cpu_seconds", "clean_findings", "quiet_findings")


def merged(record: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the rows and totals of the later campaign's faults in the place of its own.

    Runs, seconds and findings in twins are those of both: what was replaced was run, and is counted. `meta.rerun` has
    an entry for each campaign that was taken in: its faults, version, seconds, runs.
    """
    meta, new = dict(record["meta"]), later["meta"]
    faults = [row["fault"] for row in later["totals"]]
    rerun = {"faults": faults} | {name: new[name] for name in REPORTED}
    meta |= {name: meta[name] + new[name] for name in SUMS}
    meta["num_runs"] = dict(Counter(meta["num_runs"]) + Counter(new["num_runs"]))
    meta["rerun"] = [*meta.get("rerun", ()), rerun]
    return {
        "meta": meta,
        "rows": _replaced(record["rows"], later["rows"]),
        "totals": _replaced(record["totals"], later["totals"]),
    }


def expect_whole(record: Any, config: str) -> None:
    """ValueError unless the record is of a campaign of this configuration that ran to its end."""
    meta = record.get("meta") if isinstance(record, dict) else None
    if meta is None or not {"complete", "config"} <= meta.keys():
        raise ValueError("a record must be what kvcanary inject --json writes, got something else")
    if not meta["complete"] or meta["config"] != config:
        state = "complete" if meta["complete"] else "interrupted"
        raise ValueError(
            f"a record must be complete and of config {config}, got one that is {state} of {meta['config']}"
        )


def rows_and_totals(record: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
    """As they were before they were written."""
    return [Row(**row) for row in record["rows"]], [Row(**row) for row in record["totals"]]


def _replaced(rows: Sequence[Mapping[str, Any]], later: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A fault's later rows stand where its first one stood, those of a new one at the end."""
    by_fault: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_fault.setdefault(row["fault"], []).append(row)
    for row in later:
        by_fault[row["fault"]] = []
    for row in later:
        by_fault[row["fault"]].append(row)
    return [row for group in by_fault.values() for row in group]
