"""Store: write one layer's K and V into the pool, and keep a copy for `attest` from the same registers.

Attention waits for the whole of this launch, so that nothing is done here that can be done later: no product, no sum
across threads, no atomic operation.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import word_offsets
from kvcanary_kernels.record.arguments import expect_dense, expect_int64, expect_layered, live_indices
from kvcanary_kernels.record.device import (
    BLOCK_FIELD,
    FIRST_FIELD,
    PIECE_FIELDS,
    WORDS_FIELD,
    follow,
    live_count,
    tl,
    triton,
)
from kvcanary_kernels.record.overlap import overlap_options
from kvcanary_kernels.record.rows import TILE_WARPS, PoolRows, dense_values


def store(
    rows: PoolRows,
    layer: int,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    extras: Sequence[Tensor] = (),
    kept: Tensor,
    times: Tensor,
    num_live: Tensor | None = None,
    is_ready: bool = False,
    launches: bool = True,
) -> None:
    """Write values into the rows of `slots` in one layer, and keep them. May be captured.

    slots:    [n] int64, distinct; a slot outside the pool is refused, nothing is written for it
    k, v:     [n, ...] values, each row dense in the pool's element size, any row stride; v None for latent rows
    extras:   [n, ...] each, values of the pool's extras
    kept:     [layers, n, words_per_row] int32 out, the rows' words as they were stored last
    times:    [layers, n] int64, += 1 where this layer was stored
    num_live: [1] int64, entries at and after it write nothing; None: all live
    is_ready: slots, num_live and this layer's times were there before the launch that this one follows began, and
              are read while that runs
    """
    n = slots.numel()
    expect_int64(n, slots=slots)
    expect_int64(1, num_live=num_live)
    expect_layered(rows.num_layers, n, times=times)
    expect_dense((rows.num_layers, n, rows.words_per_row), torch.int32, kept=kept)
    values = dense_values(rows, layer, n, k, v, extras)
    if n == 0:
        return
    if launches:
        _store_kernel[(n, len(values))](
            rows.ptrs,
            values,
            tuple(value.stride(0) for value in values),
            slots,
            kept,
            times,
            slots if num_live is None else num_live,
            n,
            rows.num_slots,
            rows.num_layers,
            layer,
            **rows.layout,
            HAS_LIVE=num_live is not None,
            IS_READY=is_ready,
            num_warps=TILE_WARPS,
            **overlap_options(slots.device),
        )
        return
    entries = live_indices(slots, rows.num_slots, num_live)
    words = torch.cat([value[entries] for value in values], dim=1)
    rows.scatter_layer(layer, slots[entries], words)
    kept[layer, entries] = words
    times[layer, entries] += 1


store_torch = partial(store, launches=False)


@triton.jit(do_not_specialize=["n", "layer"])
def _store_kernel(
    ptrs,
    values,
    value_strides,
    slots,
    kept,
    times,
    num_live,
    n,
    num_slots,
    num_layers,
    layer,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    IS_READY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program a piece of a row: nothing that it reads depends on anything else that it reads."""
    if not IS_READY:
        follow(OVERLAPS)
    i_n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_n)
    is_stored = (i_n < live_count(num_live, n, HAS_LIVE)) & (slot >= 0) & (slot < num_slots)
    i_layer = tl.zeros([], tl.int64) + layer
    i_kept = i_layer * n + i_n
    b_times = tl.load(times + i_kept)
    base = tl.load(ptrs + tl.program_id(1) * num_layers + i_layer).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, ALIGNMENT)
    if IS_READY:
        follow(OVERLAPS)
    for i_piece in tl.static_range(len(PIECES) // PIECE_FIELDS):
        if tl.program_id(1) == i_piece:
            source = values[i_piece] + i_n * value_strides[i_piece]
            _store_piece(base, slot, source, kept + i_kept * WORDS, is_stored, PIECES, i_piece)
    if tl.program_id(1) == 0:
        tl.store(times + i_kept, b_times + 1, mask=is_stored)


@triton.jit
def _store_piece(base, slot, source, kept, is_stored, PIECES: tl.constexpr, I_PIECE: tl.constexpr):
    """Copy one piece of a row into the pool and beside it."""
    WORDS: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + WORDS_FIELD]
    FIRST: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + FIRST_FIELD]
    BLOCK: tl.constexpr = PIECES[I_PIECE * PIECE_FIELDS + BLOCK_FIELD]
    for i_word in range(0, WORDS, BLOCK):
        o_w = i_word + tl.arange(0, BLOCK)
        m_w = o_w < WORDS
        b_value = tl.load(source + o_w, mask=m_w, other=0)
        m_w &= is_stored
        tl.store(base + word_offsets(slot, o_w, PIECES, I_PIECE), b_value, mask=m_w)
        tl.store(kept + FIRST + o_w, b_value, mask=m_w)
