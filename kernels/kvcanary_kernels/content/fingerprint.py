"""Fingerprints: keyed sums over the K and V bytes of slots."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_layered, live_indices
from kvcanary_kernels.record.device import (
    BLOCK,
    FIRST_FIELD,
    PAGE_SIZE_FIELD,
    PAGE_STRIDE_FIELD,
    PIECE_FIELDS,
    RUN_FIELD,
    RUN_STRIDE_FIELD,
    SLOT_STRIDE_FIELD,
    START_B,
    UNROLL,
    WORDS_FIELD,
    low_word,
    tl,
    triton,
)
from kvcanary_kernels.record.formats import lanes_not_finite
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.record.rows import PoolRows

TEMPORARY_BYTES = 32 << 20  # bound of the float64 rows that fingerprint_torch holds at once


def fingerprint(
    rows: PoolRows,
    slots: Tensor,
    keys: Keys,
    *,
    fingerprint_a: Tensor,
    fingerprint_b: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Write the fingerprints of `slots`. May be captured.

    slots:    [n] int64; a slot outside the pool leaves its outputs as they are
    fingerprint_a:   [layers, n] int64 out, fingerprint a of each layer
    fingerprint_b:   [n] int64 out, fingerprint b summed over all layers; None skips it
    """
    n = slots.numel()
    expect_keys(rows, keys)
    expect_int64(n, slots=slots, fingerprint_b=fingerprint_b)
    expect_layered(rows.num_layers, n, fingerprint_a=fingerprint_a)
    if n == 0:
        return
    if launches:
        if fingerprint_b is not None:
            grid = (triton.cdiv(n, BLOCK),)
            _start_fingerprint_b_kernel[grid](slots, keys.constants, fingerprint_b, n, rows.num_slots, BLOCK_N=BLOCK)
        tiling = rows.tiling_of(n)
        _fingerprint_kernel[(triton.cdiv(n, tiling["TILE"]), rows.num_layers)](
            rows.ptrs,
            slots,
            keys.fingerprint_a,
            keys.fingerprint_b,
            keys.start_a,
            fingerprint_a,
            fingerprint_a if fingerprint_b is None else fingerprint_b,
            n,
            rows.num_slots,
            rows.num_layers,
            fingerprint_a.stride(0),
            **tiling,
            HAS_FINGERPRINT_B=fingerprint_b is not None,
        )
        return
    entries = live_indices(slots, rows.num_slots)
    slots = slots[entries]
    n, pieces = slots.numel(), keys.pieces.shape[2] // 2
    columns = keys.pieces[:, :, :pieces] if fingerprint_b is None else keys.pieces
    chunk = max(1, TEMPORARY_BYTES // (rows.num_layers * rows.words_per_row * 8))
    for start in range(0, n, chunk):
        part = slots[start : start + chunk]
        sums = keyed_sums(rows.gather(part), columns)
        here = slice(start, start + part.numel())
        where = here if isinstance(entries, slice) else entries[here]
        fingerprint_a[:, where] = join(sums[..., :pieces], keys).add_(keys.start_a[:, None])
        if fingerprint_b is not None:
            fingerprint_b[where] = join(sums[..., pieces:].sum(0), keys).add_(record.signed(keys.start_b))


fingerprint_torch = partial(fingerprint, launches=False)


@triton.jit(do_not_specialize=["n"])
def _start_fingerprint_b_kernel(slots, constants, fingerprint_b, n, num_slots, BLOCK_N: tl.constexpr):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n
    b_slot = tl.load(slots + o_n, mask=m_n, other=-1)
    m_n = m_n & (b_slot >= 0) & (b_slot < num_slots)
    tl.store(fingerprint_b + o_n, tl.load(constants + START_B), mask=m_n)


@triton.jit(do_not_specialize=["n", "fingerprint_a_stride"])
def _fingerprint_kernel(
    ptrs,
    slots,
    key_a,
    key_b,
    start_a,
    fingerprint_a,
    fingerprint_b,
    n,
    num_slots,
    num_layers,
    fingerprint_a_stride,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_FINGERPRINT_B: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    m_n = o_n < n
    b_slot = tl.load(slots + o_n, mask=m_n, other=-1)
    m_n = m_n & (b_slot >= 0) & (b_slot < num_slots)
    if tl.max(m_n.to(tl.int32)) == 0:
        return
    i_layer = tl.program_id(1).to(tl.int64)
    keys = i_layer * WORDS
    b_a, b_b, _ = layer_fingerprints(
        ptrs + i_layer,
        num_layers,
        b_slot,
        m_n,
        key_a + keys,
        key_b + keys,
        PIECES,
        ALIGNMENT,
        TILE,
        CHUNK,
        HAS_FINGERPRINT_B,
    )
    tl.store(fingerprint_a + i_layer * fingerprint_a_stride + o_n, b_a + tl.load(start_a + i_layer), mask=m_n)
    if HAS_FINGERPRINT_B:
        tl.atomic_add(fingerprint_b + o_n, b_b, mask=m_n, sem="relaxed")


@triton.jit
def layer_fingerprints(
    ptrs,
    num_layers,
    b_slot,
    m_n,
    key_a,
    key_b,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_FINGERPRINT_B: tl.constexpr,
    FORMATS: tl.constexpr = None,
):
    """[TILE] both keyed sums of the rows of slots in one layer (without starting constants), and whether any element of
    them is not finite (where their FORMATS are given, record/formats.py), in one reading of them.

    Products are added word by word, and only the last sums across the threads of a row, who wait for each other there.

    ptrs, key_a, key_b: of that layer; pieces are num_layers pointers apart; m_n: slots of interest, which are in the
    pool, the sums of others mean nothing; CHUNK: words of a row that are read at a time
    """
    b_slot = tl.where(m_n, b_slot, 0)  # loads without a mask are fewer instructions
    b_a = tl.zeros([TILE, CHUNK], tl.int64)
    b_b = tl.zeros([TILE, CHUNK], tl.int64)
    b_bad = tl.zeros([TILE, CHUNK], tl.uint32)
    for i_piece in tl.static_range(len(PIECES) // PIECE_FIELDS):
        base = tl.load(ptrs + i_piece * num_layers).to(tl.pointer_type(tl.int32))
        base = tl.multiple_of(base, ALIGNMENT)  # or loads are of one word each
        b_a, b_b, b_bad = _add_piece(
            b_a, b_b, b_bad, base, b_slot, key_a, key_b, PIECES, i_piece, CHUNK, HAS_FINGERPRINT_B, FORMATS
        )
    return tl.sum(b_a, 1), tl.sum(b_b, 1), tl.max((b_bad != 0).to(tl.int32), 1) != 0


@triton.jit
def _add_piece(
    b_a,
    b_b,
    b_bad,
    base,
    b_slot,
    key_a,
    key_b,
    PIECES: tl.constexpr,
    I_PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_FINGERPRINT_B: tl.constexpr,
    FORMATS: tl.constexpr,
):
    WORDS: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + WORDS_FIELD]
    FIRST: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + FIRST_FIELD]
    GROUP: tl.constexpr = min(UNROLL * CHUNK, (WORDS + CHUNK - 1) // CHUNK * CHUNK)
    for i_group in range(0, WORDS, GROUP):
        for i_chunk in tl.static_range(0, GROUP, CHUNK):
            o_w = i_group + i_chunk + tl.arange(0, CHUNK)
            o_key = FIRST + o_w
            m_w = (o_w < WORDS) | (WORDS // GROUP * GROUP == WORDS)
            words = base + word_offsets(b_slot[:, None], o_w[None, :], PIECES, I_PIECE)
            b_x = low_word(tl.load(words, mask=m_w[None, :], other=0).to(tl.int64))
            b_a += b_x * low_word(tl.load(key_a + o_key, mask=m_w, other=0).to(tl.int64))[None, :]
            if HAS_FINGERPRINT_B:
                b_b += b_x * low_word(tl.load(key_b + o_key, mask=m_w, other=0).to(tl.int64))[None, :]
            if FORMATS is not None:
                b_bad |= lanes_not_finite(b_x, o_w[None, :], FORMATS, I_PIECE)
    return b_a, b_b, b_bad


@triton.jit
def word_offsets(slot, o_w, PIECES: tl.constexpr, I_PIECE: tl.constexpr):
    """Offsets of the words o_w of a slot's piece from the words of slot 0; rows.Piece."""
    WORDS: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + WORDS_FIELD]
    PAGE_SIZE: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + PAGE_SIZE_FIELD]
    PAGE_STRIDE: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + PAGE_STRIDE_FIELD]
    SLOT_STRIDE: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + SLOT_STRIDE_FIELD]
    RUN: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + RUN_FIELD]
    RUN_STRIDE: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + RUN_STRIDE_FIELD]
    if PAGE_SIZE == 1:
        offset = slot * SLOT_STRIDE
    else:
        offset = slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * SLOT_STRIDE
    if RUN < WORDS:
        o_w = (o_w // RUN).to(tl.int64) * RUN_STRIDE + o_w % RUN
    return offset + o_w


def expect_keys(rows: PoolRows, keys: Keys) -> None:
    """The keys must be made for rows of this size."""
    if (rows.num_layers, rows.words_per_row) != (keys.num_layers, keys.words_per_row):
        raise ValueError(
            f"keys are for {keys.num_layers} layers of {keys.words_per_row} words, "
            f"rows have {rows.num_layers} layers of {rows.words_per_row}"
        )


def keyed_sums(words: Tensor, columns: Tensor) -> Tensor:
    """Words [layers, n, words] int32 times key pieces [layers, words, m] -> [layers, n, m] int64.

    Exact: the key is cut into pieces for it (record/layout.py).
    """
    return torch.bmm(words.view(torch.uint32).to(torch.float64), columns).to(torch.int64)


def join(sums: Tensor, keys: Keys) -> Tensor:
    """Sum of 2^(i * piece_bits) * piece i over the last dimension, mod 2^64."""
    fingerprint = sums[..., 0]
    for i in range(1, sums.shape[-1]):
        fingerprint = torch.add(fingerprint, sums[..., i], alpha=1 << i * keys.piece_bits)
    return fingerprint


def row_fingerprints(words: Tensor, layer: int, keys: Keys) -> tuple[Tensor, Tensor]:
    """Both of rows [n, words_per_row] int32 of one layer: b is the layer's part, with the start in layer 0."""
    chunk = max(1, TEMPORARY_BYTES // (8 * words.shape[1]))
    columns = keys.pieces[layer : layer + 1]
    sums = torch.cat([keyed_sums(part[None], columns)[0] for part in words.split(chunk)])
    fingerprint_a, fingerprint_b = join(sums.unflatten(1, (2, -1)), keys).unbind(1)
    return fingerprint_a + keys.start_a[layer], fingerprint_b + (record.signed(keys.start_b) if layer == 0 else 0)
