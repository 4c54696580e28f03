"""Lengths and page counts that are estimated twice, by two formulas."""

from __future__ import annotations

from collections.abc import Callable

from kvcanary.faults.fault import Fault


def _worst_case(pages: int, *, worst_case: Callable[[], int]) -> int:
    return worst_case()


FAULTS = (
    Fault(
        name="lengths.worst_case_estimate",
        bugs=("sgl-project/sglang#22406",),
        story="The pages of the next decode step were estimated as a whole reserve for every request, although most "
        "own their pages already: under pressure requests gave up pages that nobody needed.",
        expected="needless retractions",
        applies_to="a pool under pressure: new_token_ratio below 1",
        perturb=_worst_case,
    ),
)
