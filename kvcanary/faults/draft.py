"""Draft trees whose arrays are not what their readers take them for."""

from __future__ import annotations

from typing import Any

from kvcanary.faults.fault import Fault


def _narrow(dtype: Any, *, topk: int) -> Any:
    import torch

    return torch.int32 if topk == 1 else dtype


FAULTS = (
    Fault(
        name="draft.parents_dtype",
        bugs=("sgl-project/sglang#26424",),
        story="With topk 1 the parent list became a constant, made beside the general path. Readers step by eight "
        "bytes an entry: a constant of 32-bit integers is read two entries at a time, and on behind its end.",
        expected="TreeShapeError",
        applies_to="topk 1",
        needs={"topk": 1, "num_draft_tokens": None},
        applies=lambda setup: setup.drafts,
        perturb=_narrow,
    ),
)
