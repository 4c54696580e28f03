"""The table of all breaks as Markdown: what was broken, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcanary_tools.breaks.catalogue import BREAKS
from kvcanary_tools.breaks.running import CANARIES, Row
from kvcanary_tools.breaks.verdict import is_cause_right


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """One line a break, in the order of the catalogue."""
    yield "| break | canary off | `full` | `rolling` | first cause |"
    yield "|---|---|---|---|---|"
    for name, broken in BREAKS.items():
        own = [row for row in rows if row.name == name]
        if own:
            cells = [_cell([row for row in own if row.canary == label]) for label in CANARIES]
            yield f"| {broken.what} | {' | '.join(cells)} | {_cause(own) or broken.silent} |"


def summary(rows: Sequence[Row]) -> dict[str, int]:
    """Counts of breaks and runs."""
    judged = [is_cause_right(row) for row in rows]
    reported = [right for right in judged if right is not None]
    return {
        "breaks": len({row.name for row in rows}),
        "runs": len(rows),
        "runs that ended in a finding or a typed error": sum(bool(row.ends) and row.typed for row in rows),
        "findings": len(reported),
        "findings with the right cause first": sum(reported),
    }


def _cell(rows: Sequence[Row]) -> str:
    """What ended these runs and when, each once."""
    return "; ".join(dict.fromkeys(_end(row) for row in rows)) or "-"


def _end(row: Row) -> str:
    wrong = f", {row.wrong} wrong tokens" if row.wrong else ""
    return f"{row.ends} in step {row.step}{wrong}" if row.ends else f"nothing{wrong}"


def _cause(rows: Sequence[Row]) -> str:
    return next((f"{row.cause}: {row.says}" for row in rows if row.cause), "")
