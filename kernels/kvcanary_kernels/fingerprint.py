"""Content lanes: keyed sums over the K and V bytes of slots."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels import record
from kvcanary_kernels.checks import expect_int64, expect_layered, live_indices
from kvcanary_kernels.device import START_B, live_count, low_word, tl, triton
from kvcanary_kernels.record import Keys
from kvcanary_kernels.rows import PoolRows

TEMPORARY_BYTES = 32 << 20  # bound of the float64 rows that fingerprint_torch holds at once


def fingerprint(
    rows: PoolRows,
    slots: Tensor,
    keys: Keys,
    *,
    lane_a: Tensor,
    lane_b: Tensor | None = None,
    num_live: Tensor | None = None,
) -> None:
    """Write the content lanes of `slots`. May be captured: fixed grid, live count read on the device.

    slots:    [n] int64; a slot outside the pool leaves its outputs as they are
    lane_a:   [layers, n] int64 out, lane a of each layer
    lane_b:   [n] int64 out, lane b summed over all layers; None skips it
    num_live: [1] int64, entries at and after it are padding and stay as they are; None: all live
    """
    _check(rows, slots, keys, lane_a, lane_b, num_live)
    n = slots.numel()
    if n == 0:
        return
    layers_per_program = 1 if lane_b is None else rows.num_layers  # lane b is one sum over all layers
    _fingerprint_kernel[(n, rows.num_layers // layers_per_program)](
        rows.k_ptrs,
        rows.v_ptrs,
        slots,
        keys.lane_a,
        keys.lane_b,
        keys.start_a,
        keys.constants,
        lane_a,
        lane_a if lane_b is None else lane_b,
        slots if num_live is None else num_live,
        n,
        rows.num_slots,
        rows.k_stride,
        rows.v_stride,
        lane_a.stride(0),
        layers_per_program,
        K_WORDS=rows.k_words,
        V_WORDS=rows.v_words,
        BLOCK_W=word_block(rows),
        HAS_LANE_B=lane_b is not None,
        HAS_LIVE=num_live is not None,
    )


def fingerprint_torch(
    rows: PoolRows,
    slots: Tensor,
    keys: Keys,
    *,
    lane_a: Tensor,
    lane_b: Tensor | None = None,
    num_live: Tensor | None = None,
) -> None:
    """The torch reference of `fingerprint`: sums of 32-bit words times key pieces are exact in float64."""
    _check(rows, slots, keys, lane_a, lane_b, num_live)
    entries = live_indices(slots, rows.num_slots, num_live)
    if entries is not None:
        slots = slots[entries]
    n, pieces = slots.numel(), keys.pieces.shape[2] // 2
    columns = keys.pieces[:, :, :pieces] if lane_b is None else keys.pieces
    chunk = max(1, TEMPORARY_BYTES // (rows.num_layers * rows.words_per_row * 8))
    for start in range(0, n, chunk):
        part = slots[start : start + chunk]
        words = rows.gather(part).view(torch.uint32).to(torch.float64)
        sums = torch.bmm(words, columns).to(torch.int64)  # [layers, chunk, pieces of each lane], exact (record.py)
        where = slice(start, start + part.numel()) if entries is None else entries[start : start + chunk]
        lane_a[:, where] = _join(sums[..., :pieces], keys).add_(keys.start_a[:, None])
        if lane_b is not None:
            lane_b[where] = _join(sums[..., pieces:].sum(0), keys).add_(record.signed(keys.start_b))


@triton.jit(do_not_specialize=["n", "lane_a_stride"])
def _fingerprint_kernel(
    k_ptrs,
    v_ptrs,
    slots,
    key_a,
    key_b,
    start_a,
    constants,
    lane_a,
    lane_b,
    num_live,
    n,
    num_slots,
    k_stride,
    v_stride,
    lane_a_stride,
    layers_per_program,
    K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_LANE_B: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    if i_n >= live_count(num_live, n, HAS_LIVE):
        return
    slot = tl.load(slots + i_n)
    if (slot < 0) | (slot >= num_slots):
        return
    total_b = tl.load(constants + START_B)
    first_layer = tl.program_id(1).to(tl.int64) * layers_per_program
    for i_layer in range(first_layer, first_layer + layers_per_program):
        k_row = tl.load(k_ptrs + i_layer).to(tl.pointer_type(tl.int32)) + slot * k_stride
        v_row = tl.load(v_ptrs + i_layer).to(tl.pointer_type(tl.int32)) + slot * v_stride
        k_key = i_layer * (K_WORDS + V_WORDS)
        v_key = k_key + K_WORDS
        k_a, k_b = row_lanes(k_row, key_a + k_key, key_b + k_key, K_WORDS, BLOCK_W, HAS_LANE_B)
        v_a, v_b = row_lanes(v_row, key_a + v_key, key_b + v_key, V_WORDS, BLOCK_W, HAS_LANE_B)
        tl.store(lane_a + i_layer * lane_a_stride + i_n, k_a + v_a + tl.load(start_a + i_layer))
        total_b += k_b + v_b
    if HAS_LANE_B:
        tl.store(lane_b + i_n, total_b)


@triton.jit
def row_lanes(row, key_a, key_b, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, HAS_LANE_B: tl.constexpr):
    """Both keyed sums of one row (without starting constants), in one reading of it."""
    b_a = tl.zeros([BLOCK_W], tl.int64)
    b_b = tl.zeros([BLOCK_W], tl.int64)
    for i_word in range(0, WORDS, BLOCK_W):
        o_w = i_word + tl.arange(0, BLOCK_W)
        m_w = o_w < WORDS
        b_x = low_word(tl.load(row + o_w, mask=m_w, other=0).to(tl.int64))
        b_a += low_word(tl.load(key_a + o_w, mask=m_w, other=0).to(tl.int64)) * b_x
        if HAS_LANE_B:
            b_b += low_word(tl.load(key_b + o_w, mask=m_w, other=0).to(tl.int64)) * b_x
    return tl.sum(b_a), tl.sum(b_b)


def word_block(rows: PoolRows) -> int:
    """Words a program reads at a time: a power of two, at most 1024."""
    return min(1 << (max(rows.k_words, rows.v_words) - 1).bit_length(), 1024)


def _check(
    rows: PoolRows,
    slots: Tensor,
    keys: Keys,
    lane_a: Tensor,
    lane_b: Tensor | None,
    num_live: Tensor | None,
) -> None:
    n = slots.numel()
    expect_keys(rows, keys)
    expect_int64(n, slots=slots, lane_b=lane_b)
    expect_int64(1, num_live=num_live)
    expect_layered(rows.num_layers, n, lane_a=lane_a)


def expect_keys(rows: PoolRows, keys: Keys) -> None:
    """The keys must be made for rows of this size."""
    if (rows.num_layers, rows.words_per_row) != (keys.num_layers, keys.words_per_row):
        raise ValueError(
            f"keys are for {keys.num_layers} layers of {keys.words_per_row} words, "
            f"rows have {rows.num_layers} layers of {rows.words_per_row}"
        )


def _join(sums: Tensor, keys: Keys) -> Tensor:
    """Sum of 2^(i * piece_bits) * piece i over the last dimension, mod 2^64."""
    lane = sums[..., 0]
    for i in range(1, sums.shape[-1]):
        lane = torch.add(lane, sums[..., i], alpha=1 << i * keys.piece_bits)
    return lane
