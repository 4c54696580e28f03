"""Merging: attention over keys that were read in two passes, from what each pass gave."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.engine.attention.kernels import LOG2_E
from kvcanary_kernels.record.device import follow, tl, triton
from kvcanary_kernels.record.overlap import overlap_options

ROWS = 16  # of a program


def merge_passes(
    first: Tensor, second: Tensor, first_lse: Tensor, second_lse: Tensor, out: Tensor, *, launches: bool = True
) -> None:
    """The mean of two passes over disjoint keys, weighted by their sums of exponents, in float32. May be captured.

    first, second: [batch, heads, n, dim] of each pass, dense in dim, any other strides
    their lse:     [batch, heads, n] float32, natural logarithm of the sum of exponents, any strides; finite in one pass
    out:           [batch, n, heads, dim], dense
    """
    batch, n, heads, dim = out.shape
    shapes: dict[str, tuple[Tensor, tuple[int, ...]]]
    shapes = {"first": (first, (batch, heads, n, dim)), "second": (second, (batch, heads, n, dim))}
    shapes |= {"first_lse": (first_lse, (batch, heads, n)), "second_lse": (second_lse, (batch, heads, n))}
    for name, (value, shape) in shapes.items():
        if value.shape != shape or (value.dim() == 4 and dim > 1 and value.stride(3) != 1):
            raise ValueError(f"{name} must be {list(shape)}, dense in dim, got {list(value.shape)} at {value.stride()}")
    if not out.is_contiguous():
        raise ValueError(f"out must be dense, got strides {out.stride()}")
    if not out.numel():
        return
    if launches:
        _merge_passes_kernel[(triton.cdiv(n * heads, ROWS), batch)](
            first,
            second,
            first_lse,
            second_lse,
            out,
            n,
            *first.stride()[:3],
            *second.stride()[:3],
            *first_lse.stride(),
            *second_lse.stride(),
            HEADS=heads,
            DIM=dim,
            BLOCK_R=ROWS,
            BLOCK_D=triton.next_power_of_2(dim),
            **overlap_options(out.device),
        )
        return
    more = (second_lse - first_lse)[..., None]
    out.copy_((first.float() * torch.sigmoid(-more) + second.float() * torch.sigmoid(more)).transpose(1, 2))


merge_passes_torch = partial(merge_passes, launches=False)


@triton.jit(do_not_specialize=["n"])
def _merge_passes_kernel(
    first,
    second,
    first_lse,
    second_lse,
    out,
    n,
    first_batch_stride,
    first_head_stride,
    first_stride,
    second_batch_stride,
    second_head_stride,
    second_stride,
    first_lse_batch_stride,
    first_lse_head_stride,
    first_lse_stride,
    second_lse_batch_stride,
    second_lse_head_stride,
    second_lse_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    i_batch = tl.program_id(1).to(tl.int64)
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # token by token, its heads together
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < n.to(tl.int64) * HEADS
    m_o = m_r[:, None] & (o_d < DIM)[None, :]
    o_token = o_r // HEADS
    o_head = o_r % HEADS
    o_first = i_batch * first_batch_stride + o_head * first_head_stride + o_token * first_stride
    o_second = i_batch * second_batch_stride + o_head * second_head_stride + o_token * second_stride
    o_lse = i_batch * first_lse_batch_stride + o_head * first_lse_head_stride + o_token * first_lse_stride
    b_more = -tl.load(first_lse + o_lse, mask=m_r, other=0.0)
    o_lse = i_batch * second_lse_batch_stride + o_head * second_lse_head_stride + o_token * second_lse_stride
    b_more += tl.load(second_lse + o_lse, mask=m_r, other=0.0)
    b_less = tl.exp2(-tl.abs(b_more) * LOG2_E)  # the smaller sum over the larger
    b_small = b_less / (1.0 + b_less)
    b_large = 1.0 / (1.0 + b_less)
    b_first = tl.load(first + o_first[:, None] + o_d[None, :], mask=m_o, other=0.0).to(tl.float32)  # [R, D]
    b_second = tl.load(second + o_second[:, None] + o_d[None, :], mask=m_o, other=0.0).to(tl.float32)
    b_out = b_first * tl.where(b_more > 0, b_small, b_large)[:, None]
    b_out += b_second * tl.where(b_more > 0, b_large, b_small)[:, None]
    o_out = (i_batch * n * HEADS + o_r) * DIM
    tl.store(out + o_out[:, None] + o_d[None, :], b_out.to(out.dtype.element_ty), mask=m_o)
