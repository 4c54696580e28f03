"""Product: a row times the transpose of a weight, at the speed at which the weight can be read.

The programs of a launch are there before what they multiply is: the head of their weight is on its way while the kernel
before them is still at work, and only then do they wait for it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcanary_kernels.record.device import tl, triton
from kvcanary_kernels.record.overlap import overlap_options

TILE = 4096  # numbers of the weight that a program takes at a time


def product(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    launches: bool = True,
) -> None:
    """out = x @ weight.T + bias + residual, summed in float32 and rounded once. May be captured.

    Each row of x reads the whole weight: for more than one a library's product is faster.

    x:        [n, size], dense rows
    weight:   [m, size], dense rows; ``gated``: gates, then as many ups, and out is silu(gate) * up in float32
    out:      [n, m], gated [n, m / 2], dense rows; may be ``residual`` itself
    bias:     [m];  residual: as out; both None where gated
    """
    (n, size), m = x.shape, weight.shape[0]
    width = m // 2 if gated else m
    if weight.shape != (m, size) or out.shape != (n, width) or (gated and m % 2):
        raise ValueError(
            f"weight must be [m, {size}] and out [{n}, {'m / 2' if gated else 'm'}], "
            f"got {list(weight.shape)} and {list(out.shape)}"
        )
    for name, value in (("x", x), ("weight", weight), ("out", out)):
        if 1 not in (value.stride(1), value.shape[1]):
            raise ValueError(f"{name} must have dense rows, got strides {list(value.stride())}")
    if gated and (bias is not None or residual is not None):
        raise ValueError("a gated product takes neither bias nor residual, got one: leave it out")
    if bias is not None and bias.shape != (m,):
        raise ValueError(f"bias must be [{m}], got {list(bias.shape)}")
    if residual is not None and (residual.shape != out.shape or 1 not in (residual.stride(1), width)):
        raise ValueError(f"residual must be {list(out.shape)} with dense rows, got {list(residual.shape)}")
    if n == 0 or width == 0:
        return
    if launches:
        tiles = _tiles(size)
        _product_kernel[(triton.cdiv(width, tiles.block_m), n)](
            x,
            weight,
            weight if bias is None else bias,
            x if residual is None else residual,
            out,
            width,
            x.stride(0),
            weight.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            SIZE=size,
            BLOCK_M=tiles.block_m,
            BLOCK_K=tiles.block_k,
            IS_GATED=gated,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            num_warps=tiles.num_warps,
            **overlap_options(x.device),
        )
        return
    exact = torch.promote_types(x.dtype, torch.float32)
    total = x.to(exact) @ weight.to(exact).t()
    if gated:
        gate, up = total.chunk(2, -1)
        total = F.silu(gate) * up
    for term in (bias, residual):
        if term is not None:
            total = total + term.to(exact)
    out.copy_(total)


product_torch = partial(product, launches=False)


class _Tiles(NamedTuple):
    """Rows of the weight that a program takes, and how much of each at a time."""

    block_m: int
    block_k: int
    num_warps: int


def _tiles(size: int) -> _Tiles:
    """TILE numbers are on their way at once; more warps share them where they are of one row."""
    block_k = min(triton.next_power_of_2(size), TILE if size <= TILE else TILE // 2)
    block_m = TILE // block_k
    return _Tiles(block_m, block_k, 8 if block_m == 1 else 4)


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    m,
    x_stride,
    weight_stride,
    residual_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_n = tl.program_id(1).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    rows = weight + tl.minimum(o_m, m - 1).to(tl.int64)[:, None] * weight_stride + o_k[None, :]
    ups = rows + m.to(tl.int64) * weight_stride
    columns = x + i_n * x_stride + o_k[None, :]
    b_weight = _part(rows, o_k, 0, SIZE, BLOCK_K)
    b_up = b_weight
    if IS_GATED:
        b_up = _part(ups, o_k, 0, SIZE, BLOCK_K)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    b_acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    b_ups = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for i_k in tl.static_range(0, SIZE, BLOCK_K):
        b_this, b_this_up = b_weight, b_up
        if i_k + BLOCK_K < SIZE:
            b_weight = _part(rows, o_k, i_k + BLOCK_K, SIZE, BLOCK_K)
            if IS_GATED:
                b_up = _part(ups, o_k, i_k + BLOCK_K, SIZE, BLOCK_K)
        b_x = _part(columns, o_k, i_k, SIZE, BLOCK_K).to(tl.float32)
        b_acc += b_this.to(tl.float32) * b_x
        if IS_GATED:
            b_ups += b_this_up.to(tl.float32) * b_x
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()  # not before: programs that only wait would take the room of these
    b_out = tl.sum(b_acc, 1)
    if IS_GATED:
        b_out = b_out / (1 + tl.exp(-b_out)) * tl.sum(b_ups, 1)
    m_m = o_m < m
    if HAS_BIAS:
        b_out += tl.load(bias + o_m, mask=m_m, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_out += tl.load(residual + i_n * residual_stride + o_m, mask=m_m, other=0.0).to(tl.float32)
    tl.store(out + i_n * out_stride + o_m, b_out.to(out.dtype.element_ty), mask=m_m)


@triton.jit
def _part(rows, o_k, i_k: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [i_k, i_k + BLOCK_K) of these rows; zeros past their end."""
    if i_k + BLOCK_K <= SIZE:
        b_part = tl.load(rows + i_k)
    else:
        b_part = tl.load(rows + i_k, mask=(o_k < SIZE - i_k)[None, :], other=0.0)
    return b_part
