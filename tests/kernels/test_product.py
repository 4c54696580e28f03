"""Products of few rows: kernels against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.engine.product import product, product_torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
dtypes = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],  # the interpreter cuts it off
    ids=str,
)
POISON = float("nan")


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device, dtype)


@dtypes
@pytest.mark.parametrize(("n", "m", "size"), [(1, 1, 1), (3, 40, 72), (5, 33, 264), (2, 62, 1000), (1, 7, 2053)])
@pytest.mark.parametrize("extras", [(), ("bias",), ("residual",), ("bias", "residual")], ids="-".join)
def test_product_adds_what_it_is_given(dtype, n: int, m: int, size: int, extras, device: str) -> None:
    """Sizes below, at and above a tile, rows at any stride; what lies behind the outputs stays poisoned."""
    x = random(n, size + 8, dtype=dtype, device=device)[:, :size]
    weight = random(m, size, dtype=dtype, device=device, seed=1) / size**0.5
    terms = {
        "bias": random(m, dtype=dtype, device=device, seed=2),
        "residual": random(n, m, dtype=dtype, device=device, seed=3),
    }
    terms = {name: terms[name] for name in extras}
    wide = torch.full((n + 1, m + 3), POISON, dtype=dtype, device=device)
    out = wide[:n, :m]
    wanted = torch.empty(n, m, dtype=torch.float64, device=device)
    product_torch(x.double(), weight.double(), out=wanted, **{name: term.double() for name, term in terms.items()})
    product(x, weight, out=out, **terms)
    torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert wide[:, m:].isnan().all()
    assert wide[n:].isnan().all()
    by_hand = torch.stack([(weight.double() * row).sum(-1) for row in x.double()])
    by_hand += sum(term.double() for term in terms.values())
    torch.testing.assert_close(wanted, by_hand)


@dtypes
def test_sums_may_stay_in_float32(dtype, device: str) -> None:
    """An output of float32 is not rounded to the numbers of the operands."""
    x, weight = random(3, 264, dtype=dtype, device=device), random(33, 264, dtype=dtype, device=device, seed=1)
    out = torch.full((3, 33), POISON, dtype=torch.float32, device=device)
    product(x, weight, out=out)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)


@dtypes
@pytest.mark.parametrize(("n", "m", "size"), [(1, 1, 8), (5, 17, 100), (4, 48, 256)])
def test_a_gated_product_is_silu_of_the_gates_times_the_ups(dtype, n: int, m: int, size: int, device: str) -> None:
    """Gates are the first half of the weight's rows."""
    x = random(n, size, dtype=dtype, device=device)
    weight = random(2 * m, size, dtype=dtype, device=device, seed=1) / size**0.5
    out = torch.full((n, m), POISON, dtype=dtype, device=device)
    wanted = torch.empty(n, m, dtype=torch.float64, device=device)
    product_torch(x.double(), weight.double(), out=wanted, gated=True)
    product(x, weight, out=out, gated=True)
    torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    gate, up = x.double() @ weight[:m].double().t(), x.double() @ weight[m:].double().t()
    torch.testing.assert_close(wanted, gate * gate.sigmoid() * up)


def test_the_residual_may_be_the_output(device: str) -> None:
    """Each number is read before it is written, by the same program."""
    x, weight = random(2, 64, dtype=torch.float32, device=device), random(48, 64, dtype=torch.float32, device=device)
    total = random(2, 48, dtype=torch.float32, device=device, seed=5)
    wanted = torch.empty_like(total)
    product_torch(x, weight, out=wanted, residual=total)
    product(x, weight, out=total, residual=total)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    """Bit for bit: a verify of many nodes computes what a decode of one does."""
    x, weight = random(7, 96, dtype=torch.float16, device=device), random(40, 96, dtype=torch.float16, device=device)
    together, alone = (torch.full((7, 40), POISON, dtype=torch.float16, device=device) for _ in range(2))
    product(x, weight, out=together)
    for row in range(7):
        product(x[row : row + 1], weight, out=alone[row : row + 1])
    assert torch.equal(together, alone)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "size", "gated"), [(6144, 4096, False), (4096, 14336, False), (28672, 4096, True)])
def test_shapes_of_a_model_of_8b(m: int, size: int, gated: bool) -> None:
    """In bf16, as one launch behind another: each waits for the one whose output it reads."""
    weight = random(m, size, dtype=torch.bfloat16, device="cuda") / size**0.5
    back = random(size, m // 2 if gated else m, dtype=torch.bfloat16, device="cuda", seed=1) / m**0.5
    x = random(4, size, dtype=torch.bfloat16, device="cuda", seed=2)
    out = torch.full((4, back.shape[1]), POISON, dtype=torch.bfloat16, device="cuda")
    again, wanted = torch.full_like(x, POISON), torch.empty_like(out)
    for _ in range(3):
        product(x, weight, out=out, gated=gated)
        product(out, back, out=again)
        product_torch(x, weight, out=wanted, gated=gated)
        torch.testing.assert_close(out, wanted, rtol=1.6e-2, atol=1.6e-2)
        product_torch(out, back, out=(expected := torch.empty_like(again)))
        torch.testing.assert_close(again, expected, rtol=1.6e-2, atol=1.6e-2)
        x = again / again.float().std()
        x = x.to(torch.bfloat16)


def test_operands_of_other_shapes_are_refused() -> None:
    """With the shape that was given and the one that is due."""
    x, weight = torch.zeros(2, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match=r"weight must be \[m, 8\] and out \[2, m\], got \[6, 8\] and \[2, 5\]"):
        product(x, weight, out=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"bias must be \[6\], got \[5\]"):
        product(x, weight, out=torch.zeros(2, 6), bias=torch.zeros(5))
    with pytest.raises(ValueError, match=r"residual must be \[2, 6\] with dense rows, got \[2, 5\]"):
        product(x, weight, out=torch.zeros(2, 6), residual=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="takes neither bias nor residual"):
        product(x, weight, out=torch.zeros(2, 3), bias=torch.zeros(6), gated=True)
    with pytest.raises(ValueError, match="x must have dense rows"):
        product(torch.zeros(8, 2).t(), weight, out=torch.zeros(2, 6))
