"""What stands between the products of a decoder layer: kernels against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.engine.layers import (
    add_norm,
    add_norm_torch,
    gated,
    gated_torch,
    norm,
    norm_torch,
    rotate,
    rotate_torch,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # Triton's interpreter cuts bf16 off
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
POISON = float("nan")


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def expect_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (8, 2, 128), (1, 1, 10)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_is_float64s_rotation(dtype, heads: int, kv_heads: int, dim: int, has_norm: bool, device: str) -> None:
    """q and k of every row, at any row stride, with and without their norms; v and what lies beside stay."""
    n, all_heads = 5, heads + 2 * kv_heads
    wide = random(n, all_heads * dim + 6, dtype=dtype, device=device)
    before = wide.clone()
    qkv = wide[:, : all_heads * dim].view(n, all_heads, dim)
    angles = random(n, 2 * dim, dtype=dtype, device=device, seed=1).view(n, 2, 1, dim)
    cos, sin = angles.unbind(1)
    norms = [random(dim, dtype=dtype, device=device, seed=seed) for seed in (2, 3)] if has_norm else [None, None]
    settings = {"num_heads": heads + kv_heads, "num_q_heads": heads, "eps": 1e-5}
    wanted = qkv.double()
    exact = [None if norm is None else norm.double() for norm in norms]
    rotate_torch(wanted, cos.double(), sin.double(), q_norm=exact[0], k_norm=exact[1], **settings)
    rotate(qkv, cos, sin, q_norm=norms[0], k_norm=norms[1], **settings)
    expect_close(qkv, wanted)
    assert torch.equal(wide[:, (heads + kv_heads) * dim :], before[:, (heads + kv_heads) * dim :])


def test_rotate_turns_pairs_of_numbers() -> None:
    """By hand: dim 4, an angle of 90 degrees turns (x0, x2) into (-x2, x0); the other pair stays."""
    qkv = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[[0.0, 1.0, 0.0, 1.0]]]), torch.tensor([[[-1.0, 0.0, 1.0, 0.0]]])
    rotate_torch(qkv, cos, sin, num_heads=1)
    assert qkv.flatten().tolist() == [-3.0, 2.0, 1.0, 4.0]


@dtypes
@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 48), (2, 1025)])
def test_gated_is_silu_times_up(dtype, n: int, m: int, device: str) -> None:
    """Sizes below and above one block; outputs that were poisoned."""
    gate_up = random(n, 2 * m, dtype=dtype, device=device)
    out = torch.full((n, m), POISON, dtype=dtype, device=device)
    wanted = torch.empty(n, m, dtype=torch.float64, device=device)
    gated_torch(gate_up.double(), wanted)
    gated(gate_up, out)
    expect_close(out, wanted)
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(wanted, gate * gate.sigmoid() * up)


@dtypes
@pytest.mark.parametrize(("n", "size"), [(1, 1), (3, 192), (2, 1000)])
def test_add_norm_adds_and_norms(dtype, n: int, size: int, device: str) -> None:
    """The sum is rounded once, and it is the rounded sum whose norm is taken."""
    hidden, delta = (random(n, size, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = random(size, dtype=dtype, device=device, seed=2)
    total, normed = (torch.full((n, size), POISON, dtype=dtype, device=device) for _ in range(2))
    add_norm(hidden, delta, weight, 1e-6, total=total, normed=normed)
    expect_close(total, hidden.double() + delta.double())
    exact = total.double()
    expect_close(normed, exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())
    twin = [torch.empty_like(total), torch.empty_like(total)]
    add_norm_torch(hidden, delta, weight, 1e-6, total=twin[0], normed=twin[1])
    expect_close(twin[0], exact)
    expect_close(twin[1], normed.double())
    alone, twin_alone = torch.full_like(total, POISON), torch.empty_like(total)
    norm(total, weight, 1e-6, normed=alone)
    norm_torch(twin[0], weight, 1e-6, normed=twin_alone)
    assert torch.equal(alone, normed)
    assert torch.equal(twin_alone, twin[1])


def test_operands_of_other_shapes_are_refused() -> None:
    """With the shape that was given and the one that is due."""
    ones = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"cos must be \[2, 1, 4\] with dense rows, got \[2, 4\]"):
        rotate(ones, ones[:, 0], ones[:, :1], num_heads=2)
    with pytest.raises(ValueError, match=r"qkv must be \[n, >= 5 heads"):
        rotate(ones, ones[:, :1], ones[:, :1], num_heads=5)
    with pytest.raises(ValueError, match=r"gate_up must be \[2, 8\] for out \[2, 4\]"):
        gated(ones[:, 0], torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"delta must be \[2, 4\] with dense rows, got \[2, 3\]"):
        add_norm(ones[:, 0], ones[:, :, 0], ones[0, 0], 0.0, total=ones[:, 1], normed=ones[:, 2])
    with pytest.raises(ValueError, match=r"weight must be \[4\]"):
        add_norm(ones[:, 0], ones[:, 0], ones[0, 0, :3], 0.0, total=ones[:, 1], normed=ones[:, 2])
