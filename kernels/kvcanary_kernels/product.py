"""Product: few rows times the transpose of a weight, at the speed at which the weight can be read.

The programs of a launch are there before what they multiply is: they bring the head of their weight into the L2 cache
while the kernel before them is still at work, and only then wait for it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcanary_kernels.device import tl, triton
from kvcanary_kernels.overlap import overlap_options

MAX_ROWS = 16  # beyond it the matrix units are the limit, not the memory
LEAST_TILE = 16  # of rows and columns that a matrix unit takes


def product(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> None:
    """out = x @ weight.T + bias + residual, summed in float32 and rounded once. May be captured.

    x:        [n, size], n at most MAX_ROWS, dense rows
    weight:   [m, size], dense rows; ``gated``: gates, then as many ups, and out is silu(gate) * up in float32
    out:      [n, m], gated [n, m / 2], dense rows; may be ``residual`` itself
    bias:     [m];  residual: as out; both None where gated
    """
    _expect(x, weight, out, bias, residual, gated)
    n, size = x.shape
    m = out.shape[1]
    if n == 0 or m == 0:
        return
    if n > MAX_ROWS:
        raise ValueError(f"the kernel takes at most {MAX_ROWS} rows, got {n}: use a library's product")
    tiles = _tiles(x.element_size(), gated)
    _product_kernel[(triton.cdiv(m, tiles.block_m),)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        n,
        m,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=LEAST_TILE,
        BLOCK_K=tiles.block_k,
        AHEAD=tiles.ahead,
        IS_GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlap_options(x.device),
    )


class _Tiles(NamedTuple):
    """What a program takes; ahead: bytes of each of its weight rows that it asks for before it waits."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    ahead: int


def _tiles(element_size: int, gated: bool) -> _Tiles:
    if element_size == 4:  # exact products take no matrix unit
        return _Tiles(16, 64, 4, 2, 0)
    return _Tiles(16 if gated else 32, 128, 4, 5, 1024)


def product_torch(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> None:
    """The torch reference of `product`."""
    _expect(x, weight, out, bias, residual, gated)
    exact = torch.promote_types(x.dtype, torch.float32)
    total = x.to(exact) @ weight.to(exact).t()
    if gated:
        gate, up = total.chunk(2, -1)
        total = F.silu(gate) * up
    for term in (bias, residual):
        if term is not None:
            total = total + term.to(exact)
    out.copy_(total)


@triton.jit(do_not_specialize=["n", "m"])
def _product_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    n,
    m,
    x_stride,
    weight_stride,
    residual_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    first_m = tl.program_id(0) * BLOCK_M
    o_m = first_m + tl.arange(0, BLOCK_M)
    o_row = tl.minimum(o_m, m - 1).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < n
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD > 0:
            _fetch_ahead(weight, first_m, m, weight_stride, BLOCK_M, AHEAD)
            if IS_GATED:
                _fetch_ahead(weight + m.to(tl.int64) * weight_stride, first_m, m, weight_stride, BLOCK_M, AHEAD)
        tl.extra.cuda.gdc_wait()
    rows = weight + o_row[:, None] * weight_stride + o_k[None, :]
    ups = rows + m.to(tl.int64) * weight_stride
    columns = x + o_n[None, :].to(tl.int64) * x_stride + o_k[:, None]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(0, SIZE, BLOCK_K):
        m_k = o_k < SIZE - i_k
        m_x = m_n[None, :] & m_k[:, None]
        m_w = m_k[None, :]
        if SIZE % BLOCK_K == 0:
            m_x = m_n[None, :]
            m_w = (o_k < BLOCK_K)[None, :]
        b_x = tl.load(columns + i_k, mask=m_x, other=0.0)  # [K, N]
        b_acc = tl.dot(tl.load(rows + i_k, mask=m_w, other=0.0), b_x, b_acc, input_precision="ieee")
        if IS_GATED:
            b_ups = tl.dot(tl.load(ups + i_k, mask=m_w, other=0.0), b_x, b_ups, input_precision="ieee")
    if IS_GATED:
        b_acc = b_acc / (1 + tl.exp(-b_acc)) * b_ups
    m_m = o_m < m
    if HAS_BIAS:
        b_acc += tl.load(bias + o_m, mask=m_m, other=0.0).to(tl.float32)[:, None]
    m_out = m_m[:, None] & m_n[None, :]
    if HAS_RESIDUAL:
        o_residual = o_n[None, :].to(tl.int64) * residual_stride + o_m[:, None]
        b_acc += tl.load(residual + o_residual, mask=m_out, other=0.0).to(tl.float32)
    tl.store(out + o_n[None, :].to(tl.int64) * out_stride + o_m[:, None], b_acc.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def _fetch_ahead(weight, first_m, m, stride, BLOCK_M: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for the first bytes of these rows to be brought into the L2 cache; nobody waits for them."""
    PARTS: tl.constexpr = 128 // BLOCK_M  # one request a thread
    BYTES: tl.constexpr = AHEAD // PARTS
    o_p = tl.arange(0, 128)
    o_row = tl.minimum(first_m + o_p // PARTS, m - 1).to(tl.int64)
    begin = (weight + o_row * stride).to(tl.int64) + (o_p % PARTS) * BYTES
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [begin, tl.full([128], BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def _expect(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> None:
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
