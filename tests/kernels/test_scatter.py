"""Scatter: K and V go to their slots, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.engine.scatter import scatter, scatter_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "heads", "dim"), [(0, 2, 8), (1, 1, 5), (6, 3, 24)])
def test_values_go_to_their_slots(dtype, n: int, heads: int, dim: int, device: str) -> None:
    """From rows at any stride into rows at any stride; a slot outside the pool is refused, no other row changes."""
    pool = torch.randn(9, 2, heads, dim, device=device).to(dtype)
    slots = torch.tensor([4, -1, 8, 9, 0, 2**40][:n], dtype=torch.int64, device=device).repeat_interleave(3)[::3]
    k, v = torch.randn(n, 2 * heads + 1, dim, device=device).to(dtype).split_with_sizes((heads, heads + 1), 1)
    v, twin, before = v[:, :heads], pool.clone(), pool.clone()
    scatter(slots, k, v, pool[:, 0], pool[:, 1])
    scatter_torch(slots, k, v, twin[:, 0], twin[:, 1])
    assert torch.equal(pool, twin)
    for entry, slot in enumerate(slots.tolist()):
        if 0 <= slot < 9:
            before[slot, 0], before[slot, 1] = k[entry], v[entry]
    assert torch.equal(pool, before)


def test_operands_of_other_shapes_are_refused() -> None:
    """With the shape that was given and the one that is due."""
    slots, rows = torch.zeros(2, dtype=torch.int64), torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"v must be \[2, 2, 8\] torch.float32 with dense rows, got \[3, 2, 8\]"):
        scatter(slots, rows[:2], rows[:3], rows, rows)
    with pytest.raises(ValueError, match=r"v_pool must be \[4, 2, 8\] torch.float32"):
        scatter(slots, rows[:2], rows[:2], rows, rows.half())
    with pytest.raises(ValueError, match=r"slots must be \[n\] torch.int64, got \[2\] torch.int32"):
        scatter(slots.int(), rows[:2], rows[:2], rows, rows)
    with pytest.raises(ValueError, match="with dense rows"):
        scatter(slots, rows[:2].transpose(1, 2), rows[:2], rows.transpose(1, 2), rows)
