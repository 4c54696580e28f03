"""What stands between the matrix products of a decoder layer, each in one reading of its operands."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcanary_kernels.record.device import follow, tl, triton
from kvcanary_kernels.record.overlap import overlap_options

BLOCK_GATED = 1024
HEADS_ROTATED = 8  # by a program
MAX_HIDDEN = 1 << 16  # of a row that one program holds whole


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    num_q_heads: int = 0,
    eps: float = 0.0,
    launches: bool = True,
) -> None:
    """Rotate the first ``num_heads`` heads of every row to its position, in place and in float32. May be captured.

    qkv:            [n, heads, dim], dense heads; q, then k, then v, which stays as it is
    cos, sin:       [n, 1, dim] of each row's position, dense; the first half of sin negated
    q_norm, k_norm: [dim] weights of an RMS norm before the rotation, of the first ``num_q_heads`` and of the others
    """
    n, heads, dim = qkv.shape
    if qkv.stride(2) != 1 or dim % 2 or not 0 < num_heads <= heads:
        raise ValueError(
            f"qkv must be [n, >= {num_heads} heads, even dim] with dense heads, got {list(qkv.shape)} "
            f"at strides {list(qkv.stride())}"
        )
    for name, value in (("cos", cos), ("sin", sin)):
        if value.shape != (n, 1, dim) or value.stride(2) != 1:
            raise ValueError(f"{name} must be [{n}, 1, {dim}] with dense rows, got {list(value.shape)}")
    if n == 0:
        return
    if launches:
        block_h = min(HEADS_ROTATED, triton.next_power_of_2(num_heads))
        _rotate_kernel[(n, triton.cdiv(num_heads, block_h))](
            qkv,
            cos,
            sin,
            cos if q_norm is None else q_norm,
            cos if k_norm is None else k_norm,
            *qkv.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            num_heads,
            num_q_heads,
            eps,
            HALF=dim // 2,
            BLOCK_H=block_h,
            BLOCK=triton.next_power_of_2(dim // 2),
            HAS_NORM=q_norm is not None,
            num_warps=1,
            **overlap_options(qkv.device),
        )
        return
    x = qkv[:, :num_heads].to(torch.promote_types(qkv.dtype, torch.float32))
    if q_norm is not None and k_norm is not None:
        weights = torch.stack([q_norm] * num_q_heads + [k_norm] * (num_heads - num_q_heads)).to(x.dtype)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights
    qkv[:, :num_heads] = (x * cos + x.roll(dim // 2, -1) * sin).to(qkv.dtype)


rotate_torch = partial(rotate, launches=False)


def gated(gate_up: Tensor, out: Tensor, *, launches: bool = True) -> None:
    """silu(gate) * up in float32: gate_up [n, 2 * m] to out [n, m], dense rows. May be captured."""
    n, m = out.shape
    if gate_up.shape != (n, 2 * m) or 1 not in (gate_up.stride(1), m) or 1 not in (out.stride(1), m):
        raise ValueError(
            f"gate_up must be [{n}, {2 * m}] for out [{n}, {m}], both of dense rows, got {list(gate_up.shape)}"
        )
    if n == 0:
        return
    if launches:
        strides, options = (gate_up.stride(0), out.stride(0)), overlap_options(out.device)
        _gated_kernel[(n, triton.cdiv(m, BLOCK_GATED))](gate_up, out, m, *strides, BLOCK=BLOCK_GATED, **options)
        return
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    out.copy_(F.silu(gate) * up)


gated_torch = partial(gated, launches=False)


def add_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, *, total: Tensor, normed: Tensor, launches: bool = True
) -> None:
    """total = hidden + delta, as it is rounded, and its RMS norm times weight, in float32. May be captured.

    hidden, delta, total, normed: [n, size], dense rows;  weight: [size]
    """
    _expect_rows(hidden, delta, weight, total, normed)
    n, size = hidden.shape
    if n == 0:
        return
    if launches:
        rows = hidden, delta, weight, total, normed
        strides = (row.stride(0) for row in (hidden, delta, total, normed))
        options = _whole_rows(size) | overlap_options(hidden.device)
        _add_norm_kernel[(n,)](*rows, *strides, eps, SIZE=size, HAS_DELTA=True, **options)
        return
    torch.add(hidden, delta, out=total)
    norm_torch(total, weight, eps, normed=normed)


add_norm_torch = partial(add_norm, launches=False)


def norm(x: Tensor, weight: Tensor, eps: float, *, normed: Tensor, launches: bool = True) -> None:
    """The RMS norm of x [n, size] times weight [size], in float32: `add_norm` without a delta. May be captured."""
    _expect_rows(x, x, weight, x, normed)
    n, size = x.shape
    if n == 0:
        return
    if launches:
        strides = x.stride(0), x.stride(0), x.stride(0), normed.stride(0)
        options = _whole_rows(size) | overlap_options(x.device)
        _add_norm_kernel[(n,)](x, x, weight, x, normed, *strides, eps, SIZE=size, HAS_DELTA=False, **options)
        return
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    normed.copy_(exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight)


norm_torch = partial(norm, launches=False)


def _whole_rows(size: int) -> dict[str, Any]:
    """Launch options of a program that holds a row of this size."""
    return {"BLOCK": triton.next_power_of_2(size), "num_warps": min(16, max(1, size // 512))}


@triton.jit
def _rotate_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    row_stride,
    head_stride,
    cos_stride,
    sin_stride,
    num_heads,
    num_q_heads,
    eps,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    i_n = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < HALF
    m_x = (o_h < num_heads)[:, None] & m_d[None, :]
    x = qkv + i_n * row_stride + o_h[:, None] * head_stride + o_d[None, :]
    b_low = tl.load(x, mask=m_x, other=0).to(tl.float32)  # [H, D / 2]
    b_high = tl.load(x + HALF, mask=m_x, other=0).to(tl.float32)
    if HAS_NORM:
        is_q = (o_h < num_q_heads)[:, None]
        scale = 1 / tl.sqrt((tl.sum(b_low * b_low, 1) + tl.sum(b_high * b_high, 1)) / (2 * HALF) + eps)[:, None]
        b_low *= scale * tl.where(is_q, _half(q_norm, o_d, m_d), _half(k_norm, o_d, m_d))
        b_high *= scale * tl.where(is_q, _half(q_norm + HALF, o_d, m_d), _half(k_norm + HALF, o_d, m_d))
    cos += i_n * cos_stride
    sin += i_n * sin_stride
    b_rotated = b_low * _half(cos, o_d, m_d) + b_high * _half(sin, o_d, m_d)
    tl.store(x, b_rotated.to(qkv.dtype.element_ty), mask=m_x)
    b_rotated = b_high * _half(cos + HALF, o_d, m_d) + b_low * _half(sin + HALF, o_d, m_d)
    tl.store(x + HALF, b_rotated.to(qkv.dtype.element_ty), mask=m_x)


@triton.jit
def _half(values, o_d, m_d):
    """Half a head's numbers, for all heads of a program: [1, D / 2]."""
    return tl.load(values + o_d, mask=m_d, other=0).to(tl.float32)[None, :]


@triton.jit
def _gated_kernel(gate_up, out, m, row_stride, out_stride, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    follow(OVERLAPS)
    i_n = tl.program_id(0).to(tl.int64)
    o_m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < m
    b_gate = tl.load(gate_up + i_n * row_stride + o_m, mask=m_m, other=0).to(tl.float32)
    b_up = tl.load(gate_up + i_n * row_stride + m + o_m, mask=m_m, other=0).to(tl.float32)
    tl.store(out + i_n * out_stride + o_m, b_gate / (1 + tl.exp(-b_gate)) * b_up, mask=m_m)


@triton.jit
def _add_norm_kernel(
    hidden,
    delta,
    weight,
    total,
    normed,
    hidden_stride,
    delta_stride,
    total_stride,
    normed_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < SIZE
    b_x = tl.load(hidden + i_n * hidden_stride + o_d, mask=m_d, other=0).to(tl.float32)
    if HAS_DELTA:
        b_x += tl.load(delta + i_n * delta_stride + o_d, mask=m_d, other=0).to(tl.float32)
        b_rounded = b_x.to(total.dtype.element_ty)
        tl.store(total + i_n * total_stride + o_d, b_rounded, mask=m_d)
        b_x = b_rounded.to(tl.float32)
    b_x *= 1 / tl.sqrt(tl.sum(b_x * b_x) / SIZE + eps)
    b_weight = tl.load(weight + o_d, mask=m_d, other=0).to(tl.float32)
    tl.store(normed + i_n * normed_stride + o_d, b_x * b_weight, mask=m_d)


def _expect_rows(hidden: Tensor, delta: Tensor, weight: Tensor, total: Tensor, normed: Tensor) -> None:
    rows = {"hidden": hidden, "delta": delta, "total": total, "normed": normed}
    for name, value in rows.items():
        if value.shape != hidden.shape or 1 not in (value.stride(1), value.shape[1]):
            raise ValueError(f"{name} must be {list(hidden.shape)} with dense rows, got {list(value.shape)}")
    if weight.shape != hidden.shape[1:] or not 0 < weight.numel() <= MAX_HIDDEN:
        raise ValueError(f"weight must be [{hidden.shape[1]}], at most {MAX_HIDDEN}, got {list(weight.shape)}")
