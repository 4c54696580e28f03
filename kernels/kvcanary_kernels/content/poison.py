"""Poison: fill the rows of freed slots with a pattern that is their own, and see later whether anyone wrote there.

Every byte of the pattern is at most 0x3f, so that any attention that reads it stays finite: as bf16, fp16, fp32 and
both fp8 formats each value is at least 0 and below 2. Words differ by slot, layer, K or V, and place in the row.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import word_offsets
from kvcanary_kernels.record import formulas
from kvcanary_kernels.record.arguments import expect_dense, expect_int64, live_indices
from kvcanary_kernels.record.bitmap import bitmaps_of, layers_at_once, layers_where
from kvcanary_kernels.record.device import (
    BLOCK_FIELD,
    FIRST_FIELD,
    PIECE_FIELDS,
    WORDS_FIELD,
    poison_of,
    tl,
    triton,
)
from kvcanary_kernels.record.rows import PoolRows

FINITE_BITS = 0x3F3F3F3F  # of each word of the pattern: 24 bits of a hash
NAN_WORD = 0x7FFF7FFF  # NaN as fp32, twice as bf16 and fp16, four times as fp8 (e4m3fn, e5m2)
DEVICE_FINITE_BITS = tl.constexpr(FINITE_BITS)
DEVICE_NAN_WORD = tl.constexpr(NAN_WORD)


def poison_fill(rows: PoolRows, slots: Tensor, *, nan: bool = False, launches: bool = True) -> None:
    """Write the pattern into the K and V rows of `slots`, in every layer. May be captured.

    slots:    [n] int64; a slot outside the pool is refused, nothing is written for it
    nan:      the same NaN in every word instead: a debug mode, for one wrong read then ruins the reader's output
    """
    n = slots.numel()
    expect_int64(n, slots=slots)
    if n == 0:
        return
    if launches:
        _poison_fill_kernel[(n, rows.num_layers)](
            rows.ptrs,
            slots,
            rows.num_slots,
            rows.num_layers,
            WORDS=rows.words_per_row,
            PIECES=rows.constants,
            NAN=nan,
        )
        return
    slots = slots[live_indices(slots, rows.num_slots)]
    for layer in range(rows.num_layers):
        rows.scatter_layer(layer, slots, poison_words(slots, layer * rows.words_per_row, rows.words_per_row, nan))


poison_fill_torch = partial(poison_fill, launches=False)


def poison_check(rows: PoolRows, slots: Tensor, *, mismatch: Tensor, nan: bool = False, launches: bool = True) -> None:
    """Compare the K and V rows of `slots` with the pattern (P1). May be captured.

    slots:    [n] int64; a slot outside the pool leaves its output as it is
    mismatch: [n, 2] int64 out, bit l of the 128: a word of layer l differs (columns: layers 0 to 63, 64 to 127)
    nan:      which pattern, as it was filled
    """
    n = slots.numel()
    expect_int64(n, slots=slots)
    expect_dense((n, 2), mismatch=mismatch)
    if n == 0:
        return
    if launches:
        _poison_check_kernel[(n,)](
            rows.ptrs,
            slots,
            mismatch,
            rows.num_slots,
            rows.num_layers,
            WORDS=rows.words_per_row,
            PIECES=rows.constants,
            NAN=nan,
            ALIGNMENT=rows.alignment,
            LAYERS=layers_at_once(rows.num_layers),
            CHUNK=rows.chunk,
        )
        return
    entries, words = live_indices(slots, rows.num_slots), rows.words_per_row
    slots = slots[entries]
    mismatch[entries] = bitmaps_of(
        (rows.gather_layer(layer, slots) != poison_words(slots, layer * words, words, nan)).any(1)
        for layer in range(rows.num_layers)
    )


poison_check_torch = partial(poison_check, launches=False)


@triton.jit
def _poison_fill_kernel(
    ptrs,
    slots,
    num_slots,
    num_layers,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    NAN: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    i_layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + i_n)
    if (slot < 0) | (slot >= num_slots):
        return
    for i_piece in tl.static_range(len(PIECES) // PIECE_FIELDS):
        base = tl.load(ptrs + i_piece * num_layers + i_layer).to(tl.pointer_type(tl.int32))
        _fill_piece(base, slot, i_layer * WORDS, PIECES, i_piece, NAN)


@triton.jit
def _fill_piece(base, slot, first, PIECES: tl.constexpr, I_PIECE: tl.constexpr, NAN: tl.constexpr):
    WORDS: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + WORDS_FIELD]
    FIRST: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + FIRST_FIELD]
    BLOCK: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + BLOCK_FIELD]
    for i_word in range(0, WORDS, BLOCK):
        o_w = i_word + tl.arange(0, BLOCK)
        b_word = _pattern(slot, first + FIRST + o_w, NAN)
        tl.store(base + word_offsets(slot, o_w, PIECES, I_PIECE), b_word, mask=o_w < WORDS)


@triton.jit
def _poison_check_kernel(
    ptrs,
    slots,
    mismatch,
    num_slots,
    num_layers,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    NAN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    LAYERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_n)
    if (slot < 0) | (slot >= num_slots):
        return
    low, high = layers_where(_differs, slot, ptrs, num_layers, (WORDS, NAN), PIECES, ALIGNMENT, LAYERS, CHUNK)
    tl.store(mismatch + 2 * i_n, low)
    tl.store(mismatch + 2 * i_n + 1, high)


@triton.jit
def _differs(b_x, slot, o_layer, o_w, WORDS_NAN: tl.constexpr, PIECES: tl.constexpr, I_PIECE: tl.constexpr):
    """Whether a word is not the pattern (bitmap.layers_where)."""
    WORDS: tl.constexpr = WORDS_NAN[0]
    FIRST: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + FIRST_FIELD]
    return b_x != _pattern(slot, o_layer * WORDS + FIRST + o_w, WORDS_NAN[1])


@triton.jit
def _pattern(slot, offsets, NAN: tl.constexpr):
    """[words] int32: poison_words of one slot."""
    z = poison_of(slot, offsets) & DEVICE_FINITE_BITS
    if NAN:
        z = tl.zeros_like(z) + DEVICE_NAN_WORD
    return z.to(tl.int32)


def poison_words(slots: Tensor, first: int, num_words: int, nan: bool = False) -> Tensor:
    """[n, num_words] int32: the pattern of these slots at words first, first + 1, ... of all their layers' words."""
    if nan:
        return torch.full((slots.numel(), num_words), NAN_WORD, dtype=torch.int32, device=slots.device)
    offsets = torch.arange(first, first + num_words, device=slots.device)
    return (formulas.poison_of(slots[:, None], offsets) & FINITE_BITS).to(torch.int32)
