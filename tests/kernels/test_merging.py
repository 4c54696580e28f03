"""Merging: two passes over disjoint keys are one over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.engine.attention import merge_passes, merge_passes_torch

both = pytest.mark.parametrize("operation", [merge_passes, merge_passes_torch], ids=["triton", "torch"])


def passes(batch: int, heads: int, n: int, dim: int, device: str, dtype=torch.float32) -> tuple[Tensor, ...]:
    """Outputs and LSEs whose strides are of other orders, and an output full of NaN."""
    generator = torch.Generator().manual_seed(n)
    first = torch.randn(batch, n, heads, dim, generator=generator).transpose(1, 2)
    second = torch.randn(batch, heads, n, dim, generator=generator)
    first_lse = 3 * torch.randn(batch, heads, n, generator=generator)
    second_lse = 3 * torch.randn(batch, n, heads, generator=generator).transpose(1, 2)
    out = torch.full((batch, n, heads, dim), torch.nan, dtype=dtype, device=device)
    there = [value.to(device) for value in (first, second)]
    return *(value.to(dtype) for value in there), first_lse.to(device), second_lse.to(device), out


@both
@pytest.mark.parametrize("shape", [(1, 2, 1, 8), (2, 3, 7, 24), (1, 4, 0, 16)], ids=str)
def test_each_pass_counts_by_its_sum_of_exponents(operation, shape, device: str) -> None:
    """Against the sums themselves."""
    first, second, first_lse, second_lse, out = passes(*shape, device)
    operation(first, second, first_lse, second_lse, out)
    sums = [lse.double().exp()[..., None] for lse in (first_lse, second_lse)]
    wanted = (first * sums[0] + second * sums[1]) / (sums[0] + sums[1])
    torch.testing.assert_close(out, wanted.transpose(1, 2).float())


@both
@pytest.mark.parametrize("empty", [0, 1])
def test_a_pass_that_saw_nothing_counts_nothing(operation, empty: int, device: str) -> None:
    """Its LSE is minus infinity, and exponents far apart do not overflow."""
    *values, out = passes(1, 2, 3, 8, device)
    for nothing in (-torch.inf, -1e4):
        values[2 + empty].fill_(nothing)
        operation(*values, out)
        assert torch.equal(out, values[1 - empty].transpose(1, 2))


@both
def test_16_bit_passes_are_merged_in_float32(operation, device: str) -> None:
    """And rounded once."""
    first, second, first_lse, second_lse, out = passes(1, 2, 5, 16, device, torch.bfloat16)
    operation(first, second, first_lse, second_lse, out)
    weight = torch.sigmoid(second_lse.double() - first_lse.double())[..., None]
    wanted = first.double() + (second.double() - first.double()) * weight
    torch.testing.assert_close(out.double(), wanted.transpose(1, 2), rtol=2**-7, atol=1e-6)


def test_operands_of_other_shapes_are_refused() -> None:
    """With what was given and what is due."""
    first, second, first_lse, second_lse, out = passes(1, 2, 3, 8, "cpu")
    with pytest.raises(ValueError, match=r"second must be \[1, 2, 3, 8\], dense in dim, got \[1, 2, 2, 8\]"):
        merge_passes(first, second[:, :, :2], first_lse, second_lse, out)
    with pytest.raises(ValueError, match=r"first_lse must be \[1, 2, 3\]"):
        merge_passes(first, second, first_lse[0], second_lse, out)
    with pytest.raises(ValueError, match="out must be dense"):
        merge_passes(first, second, first_lse, second_lse, out[..., :8:1].transpose(1, 2).contiguous().transpose(1, 2))
