"""Drafts of changing length: what was made for one length is used with another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcanary.faults.fault import Fault


def _another(num_steps: int, *, chains: Mapping[int, Any]) -> int:
    return next((other for other in chains if other != num_steps), num_steps)


FAULTS = (
    Fault(
        name="adaptive.constants_of_another_length",
        story="The number of drafted tokens follows the acceptance, and the constants of a chain stay those of the "
        "length before.",
        expected="ChainConstantsError",
        applies_to="topk 1 with adaptive steps",
        needs={"topk": 1, "num_draft_tokens": None, "adaptive": True, "num_steps": 5},
        applies=lambda setup: setup.drafts and setup.model == "random",
        perturb=_another,
        quiet_needs={"adaptive": False},
    ),
)
