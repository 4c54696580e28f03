"""Content check: recompute lane a of slots and compare it with the lane that was stored when they were written."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.checks import expect_int64, expect_layered, live_indices
from kvcanary_kernels.device import live_count, tl, triton
from kvcanary_kernels.fingerprint import expect_keys, fingerprint_torch, layer_lanes
from kvcanary_kernels.record import Keys
from kvcanary_kernels.rows import PoolRows


def check_content(
    rows: PoolRows,
    slots: Tensor,
    keys: Keys,
    content_a: Tensor,
    *,
    mismatch: Tensor,
    num_live: Tensor | None = None,
) -> None:
    """Compare the bytes of `slots` with their stored lane a. May be captured.

    slots:     [n] int64; a slot outside the pool leaves its output as it is (R1 reports it)
    content_a: [layers, num_slots] int64, stored lanes
    mismatch:  [n, 2] int64 out, bit l of the 128: layer l differs (columns: layers 0 to 63, 64 to 127)
    num_live:  [1] int64, entries at and after it are padding and stay as they are; None: all live
    """
    _check(rows, slots, keys, content_a, mismatch, num_live)
    n = slots.numel()
    if n == 0:
        return
    _check_content_kernel[(n,)](
        rows.ptrs,
        slots,
        keys.lane_a,
        keys.start_a,
        content_a,
        mismatch,
        slots if num_live is None else num_live,
        n,
        rows.num_slots,
        rows.num_layers,
        content_a.stride(0),
        WORDS=rows.words_per_row,
        PIECES=rows.constants,
        HAS_LIVE=num_live is not None,
    )


def check_content_torch(
    rows: PoolRows,
    slots: Tensor,
    keys: Keys,
    content_a: Tensor,
    *,
    mismatch: Tensor,
    num_live: Tensor | None = None,
) -> None:
    """The torch reference of `check_content`."""
    _check(rows, slots, keys, content_a, mismatch, num_live)
    entries = live_indices(slots, rows.num_slots, num_live)
    if entries is not None:
        slots = slots[entries]
    lane_a = torch.empty(rows.num_layers, slots.numel(), dtype=torch.int64, device=slots.device)
    fingerprint_torch(rows, slots, keys, lane_a=lane_a)
    differs = lane_a != content_a.index_select(1, slots)
    mismatch[slice(None) if entries is None else entries] = _bitmaps(differs)


@triton.jit(do_not_specialize=["n"])
def _check_content_kernel(
    ptrs,
    slots,
    key_a,
    start_a,
    content_a,
    mismatch,
    num_live,
    n,
    num_slots,
    num_layers,
    content_stride,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    if i_n >= live_count(num_live, n, HAS_LIVE):
        return
    slot = tl.load(slots + i_n)
    if (slot < 0) | (slot >= num_slots):
        return
    content = content_a + slot
    low = tl.zeros([], tl.int64)
    high = tl.zeros([], tl.int64)
    for i_layer in range(num_layers):
        lane, _ = layer_lanes(ptrs + i_layer, num_layers, slot, key_a, key_a, PIECES, False)
        differs = (lane + tl.load(start_a + i_layer) != tl.load(content)).to(tl.int64)
        key_a += WORDS
        content += content_stride
        low |= tl.where(i_layer < 64, differs << (i_layer % 64), 0)
        high |= tl.where(i_layer < 64, 0, differs << (i_layer % 64))
    tl.store(mismatch + 2 * i_n, low)
    tl.store(mismatch + 2 * i_n + 1, high)


def mismatched_layers(mismatch: Tensor, num_layers: int) -> Tensor:
    """[layers, n] bool of a mismatch bitmap."""
    layers = torch.arange(num_layers, device=mismatch.device)
    return (mismatch[:, layers // 64] >> (layers % 64) & 1).T.bool()


def _check(
    rows: PoolRows,
    slots: Tensor,
    keys: Keys,
    content_a: Tensor,
    mismatch: Tensor,
    num_live: Tensor | None,
) -> None:
    expect_keys(rows, keys)
    expect_int64(slots.numel(), slots=slots)
    expect_int64(1, num_live=num_live)
    expect_layered(rows.num_layers, rows.num_slots, content_a=content_a)
    if mismatch.shape != (slots.numel(), 2) or mismatch.dtype is not torch.int64:
        raise ValueError(f"mismatch must be [{slots.numel()}, 2] int64, got {list(mismatch.shape)} {mismatch.dtype}")


def _bitmaps(differs: Tensor) -> Tensor:
    """[n, 2] int64 from [layers, n] bool."""
    bitmaps = torch.zeros(differs.shape[1], 2, dtype=torch.int64, device=differs.device)
    if differs.any():
        for layer in range(differs.shape[0]):
            bitmaps[:, layer // 64] |= differs[layer].to(torch.int64) << (layer % 64)
    return bitmaps
