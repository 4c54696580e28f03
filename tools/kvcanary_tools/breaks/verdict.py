"""What a run of a break must have come to, and what it comes to instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcanary_tools.breaks.broken import Break
from kvcanary_tools.breaks.catalogue import BREAKS
from kvcanary_tools.breaks.running import FULL, OFF, ROLLING, Row

LESS_ACCEPTED = 0.05  # of the accepted length, by which a run that the break has not touched may differ


def complaints(rows: Sequence[Row]) -> list[str]:
    """Sentences about the runs of one break; none where each is as it must be."""
    broken = BREAKS[rows[0].name]
    found = [f"{row.name}, canary {row.canary}, {row.case}: {text}" for row in rows for text in _of_row(broken, row)]
    if broken.ends and not any(row.ends for row in rows if row.canary == FULL):
        found.append(f"{broken.name}: no run ended in {' or '.join(broken.ends)}, the break was never made")
    return found


def is_cause_right(row: Row) -> bool | None:
    """Whether the first cause of a finding is the mistake that was made; None where there is no finding."""
    if not row.cause:
        return None
    broken = BREAKS[row.name]
    return row.cause in broken.causes and broken.says in row.says


def _of_row(broken: Break, row: Row) -> Iterator[str]:
    if not row.typed:
        yield f"an error must have a type of ours, got {row.ends}: {row.message}"
    if broken.silent:
        if row.ends:
            yield f"nothing needs to be said, got {row.ends}: {row.message}"
        if row.wrong and broken.harmless:
            yield f"{row.wrong} wrong tokens left, and it should do no harm"
        return
    if not row.ends and not (row.canary == OFF and not broken.off) and _is_touched(row):
        yield f"nothing was said, {row.wrong} wrong tokens left, {row.accepted_len} accepted of {row.unbroken_len}"
    expected = broken.off if row.canary == OFF else broken.ends
    if row.ends and expected and row.ends not in expected:
        yield f"ended in {row.ends} and not in {' or '.join(expected)}: {row.message}"
    if row.wrong and row.ends and not _may_expose(broken, row):
        yield f"{row.wrong} wrong tokens left before {row.ends}"


def _is_touched(row: Row) -> bool:
    return row.wrong > 0 or row.accepted_len < row.unbroken_len - LESS_ACCEPTED


def _may_expose(broken: Break, row: Row) -> bool:
    """Tokens may leave before bytes are read again, and without a canary where the host alone sees too little."""
    return (row.canary == ROLLING and row.ends == "R9") or (row.canary == OFF and not broken.off)
