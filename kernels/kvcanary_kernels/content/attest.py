"""Attest: fingerprint what the layers of a forward have stored, from the copies that `store` kept, into the records."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import expect_keys, layer_fingerprints, row_fingerprints
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_layered, expect_records, live_indices
from kvcanary_kernels.record.device import (
    COLUMNS,
    CONTENT_B,
    LAYERS_LOW,
    START_B,
    STORED_NOT_FINITE,
    STORED_TWICE,
    live_count,
    tl,
    triton,
)
from kvcanary_kernels.record.formats import format_constants, lanes_of, words_not_finite
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows


def kept_rows(rows: PoolRows, kept: Tensor) -> PoolRows:
    """The copies [layers, n, words_per_row] int32 that `store` keeps of rows of a pool; slot i is entry i."""
    pieces = [[words[:, piece.first : piece.first + piece.words] for words in kept] for piece in rows.pieces]
    return pool_rows(pieces[0], None, extras=pieces[1:])


def attest(
    kept: PoolRows,
    slots: Tensor,
    *,
    keys: Keys,
    times: Tensor,
    records: Tensor,
    content_a: Tensor,
    twice: Tensor,
    num_live: Tensor | None = None,
    finite: PoolRows | None = None,
    launches: bool = True,
) -> None:
    """Enter both fingerprints and the bit of every layer that `store` was called for since the last time. May be
    captured.

    After every layer was stored once since `seal`, the records hold the fingerprints that `fingerprint` finds, and all
    layers.

    kept:      `kept_rows`
    slots:     [n] int64, distinct; a slot outside the pool is refused
    times:     [layers, n] int64, how often `store` was called; zero again afterwards
    records:   [num_slots, 8] int64, sealed; content_b and layers are added to
    content_a: [layers, num_slots] int64, fingerprint a of layers that were stored is written
    twice:     [n] int64 out, STORED_TWICE is added where a layer was stored more than once (W4), STORED_NOT_FINITE
               where what it stored is NaN or infinite (N1); other entries stay as they are
    num_live:  [1] int64, entries at and after it are padding; None: all live
    finite:    the rows of which `kept` are copies, for the types of their elements; None: nobody asks
    """
    n = slots.numel()
    expect_keys(kept, keys)
    if kept.num_slots != n:
        raise ValueError(f"kept must have a row an entry, got {kept.num_slots} for {n} entries")
    expect_int64(n, slots=slots, twice=twice)
    expect_int64(1, num_live=num_live)
    expect_layered(kept.num_layers, n, times=times)
    expect_records(records)
    expect_layered(kept.num_layers, records.shape[0], content_a=content_a)
    if n == 0:
        return
    if launches:
        tiling = kept.tiling_of(n)
        _attest_kernel[(triton.cdiv(n, tiling["TILE"]), kept.num_layers)](
            kept.ptrs,
            slots,
            keys.fingerprint_a,
            keys.fingerprint_b,
            keys.start_a,
            keys.constants,
            times,
            records,
            content_a,
            twice,
            slots if num_live is None else num_live,
            n,
            records.shape[0],
            kept.num_layers,
            content_a.stride(0),
            **tiling,
            HAS_LIVE=num_live is not None,
            FORMATS=None if finite is None else format_constants(finite),
        )
        return
    lanes = None if finite is None else lanes_of(finite)
    live = torch.arange(n, device=slots.device)[live_indices(slots, records.shape[0], num_live)]
    twice[live[(times[:, live] > 1).any(0)]] |= record.STORED_TWICE
    for layer in range(kept.num_layers):
        column, bit = record.LAYERS_LOW + layer // 64, record.signed(1 << layer % 64)
        entries = live[times[layer, live] > 0]
        where = slots[entries]
        words = kept.gather_layer(layer, entries)
        content_a[layer, where], part_b = row_fingerprints(words, layer, keys)
        if lanes is not None:
            twice[entries[words_not_finite(words, lanes).any(1)]] |= record.STORED_NOT_FINITE
        records[where, record.CONTENT_B] += part_b
        records[where, column] |= bit
    times[:, live] = 0


attest_torch = partial(attest, launches=False)


@triton.jit(do_not_specialize=["n"])
def _attest_kernel(
    ptrs,
    slots,
    key_a,
    key_b,
    start_a,
    constants,
    times,
    records,
    content_a,
    twice,
    num_live,
    n,
    num_slots,
    num_layers,
    content_stride,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    FORMATS: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i_layer = tl.program_id(1).to(tl.int64)
    m_n = o_n < live_count(num_live, n, HAS_LIVE)
    b_slot = tl.load(slots + o_n, mask=m_n, other=-1)
    m_n &= (b_slot >= 0) & (b_slot < num_slots)
    own_times = times + i_layer * n + o_n
    b_times = tl.load(own_times, mask=m_n, other=0)
    m_n &= b_times > 0
    if tl.max(m_n.to(tl.int32)) == 0:
        return
    key_a += i_layer * WORDS
    key_b += i_layer * WORDS
    b_a, b_b, b_bad = layer_fingerprints(
        ptrs + i_layer, num_layers, o_n, m_n, key_a, key_b, PIECES, ALIGNMENT, TILE, CHUNK, True, FORMATS
    )
    if i_layer == 0:
        b_b += tl.load(constants + START_B)
    tl.store(content_a + i_layer * content_stride + b_slot, b_a + tl.load(start_a + i_layer), mask=m_n)
    row = records + b_slot * COLUMNS
    tl.atomic_add(row + CONTENT_B, b_b, mask=m_n, sem="relaxed")
    b_bit = tl.full([TILE], 1, tl.int64) << (i_layer % 64)
    tl.atomic_or(row + LAYERS_LOW + i_layer // 64, b_bit, mask=m_n, sem="relaxed")
    tl.store(own_times, tl.zeros_like(b_times), mask=m_n)
    b_wrong = tl.where(b_times > 1, STORED_TWICE, 0).to(tl.int64)
    if FORMATS is not None:
        b_wrong |= tl.where(b_bad, STORED_NOT_FINITE, 0).to(tl.int64)
    tl.atomic_or(twice + o_n, b_wrong, mask=m_n & (b_wrong != 0), sem="relaxed")
