"""Put: write one layer's K and V into the pool and fingerprint them from the same registers."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import expect_keys, layer_fingerprints, row_fingerprints, word_offsets
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_layered, expect_records, live_indices
from kvcanary_kernels.record.device import (
    BLOCK_FIELD,
    COLUMNS,
    CONTENT_B,
    FIRST_FIELD,
    LAYERS_LOW,
    PIECE_FIELDS,
    START_B,
    STORED_NOT_FINITE,
    STORED_TWICE,
    WORDS_FIELD,
    follow,
    live_count,
    low_word,
    tl,
    triton,
)
from kvcanary_kernels.record.formats import format_constants, lanes_not_finite, lanes_of, words_not_finite
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.record.overlap import overlap_options
from kvcanary_kernels.record.rows import TILE_WARPS, PoolRows, dense_values


def put(
    rows: PoolRows,
    layer: int,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    extras: Sequence[Tensor] = (),
    keys: Keys,
    records: Tensor,
    content_a: Tensor,
    twice: Tensor,
    num_live: Tensor | None = None,
    asks_finite: bool = False,
    launches: bool = True,
) -> None:
    """Write values into the rows of `slots` in one layer, with fingerprint a, their part of fingerprint b and the
    layer's bit.

    After every layer was stored once since `seal`, the records hold the fingerprints that `fingerprint` finds in the
    rows, and all layers. May be captured. A layer that is stored again is reported (W4) and stored all the same: bytes
    and both fingerprints are those of the new values. Entries of one call that share a slot are taken in order by the
    reference; on a GPU they race, and then only the report is certain, one for each entry beyond the first.

    slots:     [n] int64; a slot outside the pool is refused, nothing is written for it
    k, v:      [n, ...] values, each row dense in the pool's element size, any row stride; v None for latent rows
    extras:    [n, ...] each, values of the pool's extras
    records:   [num_slots, 8] int64, sealed; content_b and layers are added to
    content_a: [layers, num_slots] int64, fingerprint a of this layer is written
    twice:     [n] int64 out, STORED_TWICE is added where the layer's bit was set already (W4), and where it is asked
               STORED_NOT_FINITE where a value is NaN or infinite (N1); other entries stay as they are
    num_live:  [1] int64, entries at and after it write nothing; None: all live
    """
    n = slots.numel()
    expect_keys(rows, keys)
    expect_int64(n, slots=slots, twice=twice)
    expect_int64(1, num_live=num_live)
    expect_records(records)
    if records.shape[0] != rows.num_slots:
        raise ValueError(f"records must have a row a slot, got {records.shape[0]} for {rows.num_slots} slots")
    expect_layered(rows.num_layers, rows.num_slots, content_a=content_a)
    values = dense_values(rows, layer, n, k, v, extras)
    if n == 0:
        return
    if launches:
        _put_kernel[(n,)](
            rows.ptrs,
            values,
            tuple(value.stride(0) for value in values),
            slots,
            keys.fingerprint_a,
            keys.fingerprint_b,
            keys.start_a,
            keys.constants,
            records,
            content_a,
            twice,
            slots if num_live is None else num_live,
            n,
            rows.num_slots,
            rows.num_layers,
            layer,
            content_a.stride(0),
            **rows.layout,
            HAS_LIVE=num_live is not None,
            FORMATS=format_constants(rows) if asks_finite else None,
            num_warps=TILE_WARPS,
            **overlap_options(slots.device),
        )
        return
    entries = live_indices(slots, rows.num_slots, num_live)
    slots = slots[entries]
    column, bit = record.LAYERS_LOW + layer // 64, record.signed(1 << layer % 64)
    stored = (records[:, column].index_select(0, slots) & bit).bool()  # by an earlier launch
    repeated, replaced = _shared_slots(slots)
    again = stored if repeated is None else stored | repeated
    if bool(again.any()):
        twice[torch.arange(n, device=slots.device)[entries][again]] |= record.STORED_TWICE
    if replaced is not None:
        entries = torch.arange(n, device=slots.device)[entries][~replaced]
        slots, stored = slots[~replaced], stored[~replaced]
    words = torch.cat([value[entries] for value in values], dim=1)
    if asks_finite:
        bad = words_not_finite(words, lanes_of(rows)).any(1)
        twice[torch.arange(n, device=slots.device)[entries][bad]] |= record.STORED_NOT_FINITE
    fingerprint_a, fingerprint_b = row_fingerprints(words, layer, keys)
    if bool(stored.any()):  # by difference: what the slot holds now is in fingerprint b, the starting constant with it
        _, old_b = row_fingerprints(rows.gather_layer(layer, slots[stored]), layer, keys)
        fingerprint_b[stored] -= old_b
    rows.scatter_layer(layer, slots, words)
    content_a[layer].index_copy_(0, slots, fingerprint_a)
    records[:, record.CONTENT_B].index_add_(0, slots, fingerprint_b)
    records[:, column].index_add_(0, slots, torch.where(stored, 0, bit))


put_torch = partial(put, launches=False)


@triton.jit(do_not_specialize=["n", "layer"])
def _put_kernel(
    ptrs,
    values,
    value_strides,
    slots,
    key_a,
    key_b,
    start_a,
    constants,
    records,
    content_a,
    twice,
    num_live,
    n,
    num_slots,
    num_layers,
    layer,
    content_stride,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    FORMATS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    i_n = tl.program_id(0).to(tl.int64)
    if i_n >= live_count(num_live, n, HAS_LIVE):
        return
    slot = tl.load(slots + i_n)
    if (slot < 0) | (slot >= num_slots):
        return
    i_layer = tl.zeros([], tl.int64) + layer
    key_a += i_layer * WORDS
    key_b += i_layer * WORDS
    row = records + slot * COLUMNS
    bit = tl.full([], 1, tl.int64) << (i_layer % 64)
    total_b = tl.zeros([], tl.int64)
    if tl.atomic_or(row + LAYERS_LOW + i_layer // 64, bit, sem="relaxed") & bit != 0:
        tl.atomic_or(twice + i_n, STORED_TWICE, sem="relaxed")
        b_slot = tl.zeros([1], tl.int64) + slot
        m_slot = b_slot >= 0
        _, b_old, _ = layer_fingerprints(
            ptrs + i_layer, num_layers, b_slot, m_slot, key_a, key_b, PIECES, ALIGNMENT, 1, PIECES[BLOCK_FIELD], True
        )
        total_b -= tl.sum(b_old)
        tl.debug_barrier()  # every thread has read before any writes
    elif layer == 0:
        total_b += tl.load(constants + START_B)
    total_a = tl.load(start_a + i_layer)
    for i_piece in tl.static_range(len(PIECES) // PIECE_FIELDS):
        base = tl.load(ptrs + i_piece * num_layers + i_layer).to(tl.pointer_type(tl.int32))
        base = tl.multiple_of(base, ALIGNMENT)
        source = values[i_piece] + i_n * value_strides[i_piece]
        a, b, bad = _put_piece(base, slot, source, key_a, key_b, PIECES, i_piece, FORMATS)
        total_a += a
        total_b += b
        if FORMATS is not None:
            tl.atomic_or(twice + i_n, STORED_NOT_FINITE, mask=bad != 0, sem="relaxed")
    tl.store(content_a + i_layer * content_stride + slot, total_a)
    tl.atomic_add(row + CONTENT_B, total_b, sem="relaxed")


@triton.jit
def _put_piece(base, slot, source, key_a, key_b, PIECES: tl.constexpr, I_PIECE: tl.constexpr, FORMATS: tl.constexpr):
    """Copy one piece of a row into the pool; both keyed sums of it, and whether an element is not finite."""
    WORDS: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + WORDS_FIELD]
    FIRST: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + FIRST_FIELD]
    BLOCK: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + BLOCK_FIELD]
    b_a = tl.zeros([BLOCK], tl.int64)
    b_b = tl.zeros([BLOCK], tl.int64)
    b_bad = tl.zeros([BLOCK], tl.uint32)
    for i_word in range(0, WORDS, BLOCK):
        o_w = i_word + tl.arange(0, BLOCK)
        m_w = o_w < WORDS
        o_key = FIRST + o_w
        b_value = tl.load(source + o_w, mask=m_w, other=0)
        tl.store(base + word_offsets(slot, o_w, PIECES, I_PIECE), b_value, mask=m_w)
        b_x = low_word(b_value.to(tl.int64))
        b_a += low_word(tl.load(key_a + o_key, mask=m_w, other=0).to(tl.int64)) * b_x
        b_b += low_word(tl.load(key_b + o_key, mask=m_w, other=0).to(tl.int64)) * b_x
        if FORMATS is not None:
            b_bad |= lanes_not_finite(b_x, o_w, FORMATS, I_PIECE)
    return tl.sum(b_a), tl.sum(b_b), tl.max((b_bad != 0).to(tl.int32))


def _shared_slots(slots: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """[n] bool each: entries whose slot an earlier entry has, and whose slot a later one has; None where none has."""
    ordered, order = slots.sort(stable=True)
    same = ordered[1:] == ordered[:-1]
    if not bool(same.any()):
        return None, None
    repeated, replaced = torch.zeros_like(slots, dtype=torch.bool), torch.zeros_like(slots, dtype=torch.bool)
    repeated[order[1:]], replaced[order[:-1]] = same, same
    return repeated, replaced
