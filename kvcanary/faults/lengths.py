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
        needs={"page_size": 16, "pages": 30, "batch": 4, "new_token_ratio": 0.1},
        applies=lambda setup: setup.model == "random" and setup.prompt_len == 24 and setup.topk <= 2,
        perturb=_worst_case,
    ),
)
