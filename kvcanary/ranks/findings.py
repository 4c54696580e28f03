"""What an agreement says, as a violation: so that ranks that differ are told as everything else is."""

from __future__ import annotations

from typing import Any

from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.ranks.agreement import RanksDisagreeError
from kvcanary.ranks.copies import Place
from kvcanary.records.state import PoolState

SITE = "agreement", 0


def violation_of(error: RanksDisagreeError, pool: PoolState, place: Place | None = None) -> Violation:
    """X1 of what was decided, X2 of what was computed: there with pool, layer and slot where it lies in one.

    pool: where it lies in none;  place: where it does
    """
    found: dict[str, Any] = {"level": error.level or "report"}
    if error.minority:
        found["alone"] = list(error.minority)
    if not error.is_private and error.code == "X1" and error.position is not None:
        found["by_rank"] = list(error.values)
    violation = Violation(
        error.code, pool, NO_SLOT, None, None, SITE, error.step, expected={"ranks": "alike"}, found=found
    )
    if place is not None:
        violation.pool, violation.slot, violation.layers = place.pool, place.slot, (place.layer,)
    else:
        violation.request_id = error.name
        number = "" if error.position is None else f", number {error.position}"
        found["resource"] = (error.level or "a rank did not report") + number
    violation.notes = (str(error),)
    return violation
