"""Content check: recompute fingerprint a of slots and compare it with the fingerprint that was stored when they were
written.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import expect_keys, fingerprint_torch, layer_fingerprints
from kvcanary_kernels.record.arguments import expect_dense, expect_int64, expect_layered, live_indices
from kvcanary_kernels.record.bitmap import bitmaps_of
from kvcanary_kernels.record.device import BLOCK, live_count, tl, triton
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.record.rows import PoolRows


def check_content(
    rows: PoolRows,
    slots: Tensor,
    keys: Keys,
    content_a: Tensor,
    *,
    mismatch: Tensor | None = None,
    differs: Tensor | None = None,
    num_live: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Compare the bytes of `slots` with their stored fingerprint a (R9, behind a move T1). May be captured.

    slots:     [n] int64; a slot outside the pool leaves its output as it is (R1 reports it)
    content_a: [layers, num_slots] int64, stored fingerprints
    mismatch:  [n, 2] int64 out, bit l of the 128: layer l differs (columns: layers 0 to 63, 64 to 127)
    differs:   [1] int64, instead of that: 1 where a layer of a slot differs, else it stays as it is. It may lie in
               pinned memory of the host
    num_live:  [1] int64, entries at and after it are padding and stay as they are; None: all live
    """
    n = slots.numel()
    expect_keys(rows, keys)
    expect_int64(n, slots=slots)
    expect_int64(1, num_live=num_live, differs=differs)
    expect_layered(rows.num_layers, rows.num_slots, content_a=content_a)
    if (mismatch is None) is (differs is None):
        raise ValueError("either mismatch or differs must be given: one of them says what was found")
    if mismatch is not None:
        expect_dense((n, 2), mismatch=mismatch)
    if n == 0:
        return
    if launches:
        live = slots if num_live is None else num_live
        if mismatch is not None:
            _clear_kernel[(triton.cdiv(n, BLOCK),)](
                slots, mismatch, live, n, rows.num_slots, BLOCK_N=BLOCK, HAS_LIVE=num_live is not None
            )
        tiling = rows.tiling_of(n)
        _check_content_kernel[(triton.cdiv(n, tiling["TILE"]), rows.num_layers)](
            rows.ptrs,
            slots,
            keys.fingerprint_a,
            keys.start_a,
            content_a,
            differs if mismatch is None else mismatch,
            live,
            n,
            rows.num_slots,
            rows.num_layers,
            content_a.stride(0),
            **tiling,
            HAS_LIVE=num_live is not None,
            HAS_MISMATCH=mismatch is not None,
        )
        return
    entries = live_indices(slots, rows.num_slots, num_live)
    slots = slots[entries]
    fingerprint_a = torch.empty(rows.num_layers, slots.numel(), dtype=torch.int64, device=slots.device)
    fingerprint_torch(rows, slots, keys, fingerprint_a=fingerprint_a)
    found = fingerprint_a != content_a.index_select(1, slots)
    if mismatch is not None:
        mismatch[entries] = bitmaps_of(found)
    elif differs is not None and found.any():
        differs.fill_(1)


check_content_torch = partial(check_content, launches=False)


@triton.jit(do_not_specialize=["n"])
def _clear_kernel(slots, mismatch, num_live, n, num_slots, BLOCK_N: tl.constexpr, HAS_LIVE: tl.constexpr):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < live_count(num_live, n, HAS_LIVE)
    b_slot = tl.load(slots + o_n, mask=m_n, other=-1)
    m_n = m_n & (b_slot >= 0) & (b_slot < num_slots)
    b_zero = tl.zeros([BLOCK_N], tl.int64)
    tl.store(mismatch + 2 * o_n, b_zero, mask=m_n)
    tl.store(mismatch + 2 * o_n + 1, b_zero, mask=m_n)


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
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_MISMATCH: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    m_n = o_n < live_count(num_live, n, HAS_LIVE)
    b_slot = tl.load(slots + o_n, mask=m_n, other=-1)
    m_n = m_n & (b_slot >= 0) & (b_slot < num_slots)
    if tl.max(m_n.to(tl.int32)) == 0:
        return
    i_layer = tl.program_id(1).to(tl.int64)
    key = key_a + i_layer * WORDS
    b_stored = tl.load(content_a + i_layer * content_stride + b_slot, mask=m_n, other=0)  # on its way meanwhile
    b_fingerprint, _, _ = layer_fingerprints(
        ptrs + i_layer, num_layers, b_slot, m_n, key, key, PIECES, ALIGNMENT, TILE, CHUNK, False
    )
    m_differs = m_n & (b_fingerprint + tl.load(start_a + i_layer) != b_stored)
    if HAS_MISMATCH:
        b_bit = tl.full([TILE], 1, tl.int64) << (i_layer % 64)
        tl.atomic_or(mismatch + 2 * o_n + i_layer // 64, b_bit, mask=m_differs, sem="relaxed")
    elif tl.max(m_differs.to(tl.int32)) > 0:
        tl.store(mismatch, tl.full([], 1, tl.int64))


def mismatched_layers(mismatch: Tensor, num_layers: int) -> Tensor:
    """[layers, n] bool of a mismatch bitmap."""
    layers = torch.arange(num_layers, device=mismatch.device)
    return (mismatch[:, layers // 64] >> (layers % 64) & 1).T.bool()
