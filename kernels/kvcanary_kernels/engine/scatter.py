"""Scatter: write one layer's K and V into a pool, where no fingerprint is taken of them."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.device import follow, tl, triton
from kvcanary_kernels.record.overlap import overlap_options


def scatter(slots: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, *, launches: bool = True) -> None:
    """k_pool[slots], v_pool[slots] = k, v. May be captured.

    slots:          [n] int64, any stride; a slot outside the pool is refused, nothing is written for it
    k, v:           [n, heads, dim], each row dense, any row stride
    k_pool, v_pool: [num_slots, heads, dim] of one layer, as k and v
    """
    if slots.dtype is not torch.int64 or slots.dim() != 1:
        raise ValueError(f"slots must be [n] torch.int64, got {list(slots.shape)} {slots.dtype}")
    n, row = len(slots), k_pool.shape[1:]
    lengths = {"k": (k, n), "v": (v, n), "k_pool": (k_pool, len(k_pool)), "v_pool": (v_pool, len(k_pool))}
    for name, (value, length) in lengths.items():
        if value.shape != (length, *row) or value.dtype != k_pool.dtype or not value[:1].is_contiguous():
            raise ValueError(
                f"{name} must be {[length, *row]} {k_pool.dtype} with dense rows, got {list(value.shape)} "
                f"{value.dtype} at strides {list(value.stride())}"
            )
    if n == 0:
        return
    if launches:
        tensors, size = (slots, k, v, k_pool, v_pool), row.numel()
        strides = (tensor.stride(0) for tensor in tensors)
        options = {"BLOCK": triton.next_power_of_2(size), **overlap_options(k.device)}
        _scatter_kernel[(n,)](*tensors, len(k_pool), *strides, SIZE=size, **options)
        return
    entries = ((slots >= 0) & (slots < k_pool.shape[0])).nonzero().squeeze(1)
    for values, rows in ((k, k_pool), (v, v_pool)):
        rows.index_copy_(0, slots[entries], values[entries])


scatter_torch = partial(scatter, launches=False)


@triton.jit(do_not_specialize=["num_slots"])
def _scatter_kernel(
    slots,
    k,
    v,
    k_pool,
    v_pool,
    num_slots,
    slots_stride,
    k_stride,
    v_stride,
    k_pool_stride,
    v_pool_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    i_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_n * slots_stride)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < SIZE
    b_k = tl.load(k + i_n * k_stride + o_d, mask=m_d)  # on its way with the slot
    b_v = tl.load(v + i_n * v_stride + o_d, mask=m_d)
    m_d &= (slot >= 0) & (slot < num_slots)
    tl.store(k_pool + slot * k_pool_stride + o_d, b_k, mask=m_d)
    tl.store(v_pool + slot * v_pool_stride + o_d, b_v, mask=m_d)
