"""Take and reread: content lanes of what a forward stored, and the same bytes looked at again along block tables."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels import record
from kvcanary_kernels.device import CHAIN, COLUMNS, TILE_WARPS, tl, triton
from kvcanary_kernels.fingerprint import join, keyed_sums, layer_lanes
from kvcanary_kernels.record import Keys
from kvcanary_kernels.rows import PoolRows
from kvcanary_kernels.walk import NONE, NOT_FOLLOWED, Rows, context_lengths, table_slots

LAYERS_PER_ENTRY = 128  # a hit of `reread` is position * LAYERS_PER_ENTRY + layer
PER_ENTRY = tl.constexpr(LAYERS_PER_ENTRY)


def take(
    pool: PoolRows,
    records: Tensor,
    slots: Tensor,
    chains: Tensor,
    keys: Keys,
    *,
    lanes: Tensor,
    stamps: Tensor,
    total: Tensor,
) -> None:
    """Take both lanes of `slots` as they lie in the pool now. No allocation, no wait.

    slots:  [n] int64, -1: nothing;  chains: [n] int64, what the record of each should say
    lanes:  [2, layers, num_slots] int64, written
    stamps: [num_slots] int64, written: the chain of the record whose bytes these are
    total:  [1] int64, grows by the entries whose record is another's (W4: one forward wrote the slot twice)
    """
    n = slots.numel()
    if n == 0:
        return
    _take_lanes_kernel[(triton.cdiv(n, pool.tile), pool.num_layers)](
        pool.ptrs,
        records,
        slots,
        chains,
        keys.lane_a,
        keys.lane_b,
        keys.start_a,
        lanes,
        stamps,
        total,
        n,
        pool.num_slots,
        pool.num_layers,
        lanes.stride(0),
        lanes.stride(1),
        WORDS=pool.words_per_row,
        PIECES=pool.constants,
        ALIGNMENT=pool.alignment,
        TILE=pool.tile,
        CHUNK=pool.chunk,
        num_warps=TILE_WARPS,
    )


def take_torch(
    pool: PoolRows,
    records: Tensor,
    slots: Tensor,
    chains: Tensor,
    keys: Keys,
    *,
    lanes: Tensor,
    stamps: Tensor,
    total: Tensor,
) -> None:
    """The torch reference of `take`."""
    live = slots >= 0
    slots, chains = slots[live], chains[live]
    lanes[:, :, slots] = both_lanes(pool, slots, keys)
    stamps[slots] = records[slots, record.CHAIN]
    total += (records[slots, record.CHAIN] != chains).sum()


def reread(
    pool: PoolRows,
    records: Tensor,
    rows: Rows,
    keys: Keys,
    *,
    lanes: Tensor,
    stamps: Tensor,
    ends: Tensor,
    max_length: int,
    phase: int,
    stride: int,
    window: int,
    block_size: int,
    whole: bool,
    hits: Tensor,
    total: Tensor,
) -> None:
    """Compare lane a of the entries at positions `phase`, `phase + stride`, ... of every row. No allocation, no wait.

    Entries whose bytes nobody took under the record that lies there now are not judged.

    ends:       of Truth
    max_length: at least what the longest of them has
    window:     tokens that attention sees, the reader's own included; 0: all
    whole:      False: what each row had before this forward. True: all that is recorded of it (`ends`); then lines of
                `rows.table` are by number, and its lengths and starts are not read
    hits:       [rows] int64, NO_HIT or lower before; the least of position * LAYERS_PER_ENTRY + layer of each row
    """
    n, per_row = rows.numbers.shape[0], -(-max(max_length - phase, 0) // stride)
    if n == 0 or per_row == 0:
        return
    _reread_kernel[(n, triton.cdiv(per_row, pool.tile), pool.num_layers)](
        pool.ptrs,
        records,
        rows.numbers,
        rows.table,
        rows.lengths,
        rows.starts,
        keys.lane_a,
        keys.start_a,
        lanes,
        stamps,
        ends,
        hits,
        total,
        pool.num_slots,
        pool.num_layers,
        lanes.stride(1),
        rows.table.stride(0),
        phase,
        stride,
        window,
        BLOCK_SIZE=block_size,
        WHOLE=whole,
        WORDS=pool.words_per_row,
        PIECES=pool.constants,
        ALIGNMENT=pool.alignment,
        TILE=pool.tile,
        CHUNK=pool.chunk,
        num_warps=TILE_WARPS,
    )


def reread_torch(
    pool: PoolRows,
    records: Tensor,
    rows: Rows,
    keys: Keys,
    *,
    lanes: Tensor,
    stamps: Tensor,
    ends: Tensor,
    max_length: int,
    phase: int,
    stride: int,
    window: int,
    block_size: int,
    whole: bool,
    hits: Tensor,
    total: Tensor,
) -> None:
    """The torch reference of `reread`."""
    numbers = rows.numbers.long()
    n = numbers.shape[0]
    table = rows.table[numbers] if whole else rows.table[:n]
    sizes = ends[numbers] if whole else context_lengths(rows)
    positions = torch.arange(phase, max(phase, max_length), stride, device=records.device).expand(n, -1)
    slots = table_slots(table, positions, block_size)
    live = (positions < sizes[:, None]) & (slots >= 0) & (slots < pool.num_slots)
    live &= (ends[numbers] != NOT_FOLLOWED)[:, None]
    if window:
        live &= positions > (sizes - window)[:, None]
    slots = torch.where(live, slots, 0)
    live &= stamps[slots] == records[slots, record.CHAIN]
    row, column = live.nonzero(as_tuple=True)
    found = slots[row, column]
    if not len(found):
        return
    differs = both_lanes(pool, found, keys)[0] != lanes[0, :, found]
    layer, entry = differs.nonzero(as_tuple=True)
    total += len(entry)
    hit = positions[row, column][entry] * LAYERS_PER_ENTRY + layer
    hits[:n] = hits[:n].scatter_reduce(0, row[entry], hit, "amin")


def both_lanes(pool: PoolRows, slots: Tensor, keys: Keys) -> Tensor:
    """[2, layers, n] int64: both lanes of every layer of valid slots."""
    pieces = keys.pieces.shape[2] // 2
    sums = keyed_sums(pool.gather(slots), keys.pieces)
    lane_a = join(sums[..., :pieces], keys) + keys.start_a[:, None]
    return torch.stack((lane_a, join(sums[..., pieces:], keys)))


@triton.jit(do_not_specialize=["n"])
def _take_lanes_kernel(
    ptrs,
    records,
    slots,
    chains,
    key_a,
    key_b,
    start_a,
    lanes,
    stamps,
    total,
    n,
    num_slots,
    num_layers,
    side_stride,
    layer_stride,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i_layer = tl.program_id(1).to(tl.int64)
    b_slot = tl.load(slots + o_n, mask=o_n < n, other=-1)
    m_n = (b_slot >= 0) & (b_slot < num_slots)
    keys = i_layer * WORDS
    b_a, b_b = layer_lanes(
        ptrs + i_layer, num_layers, b_slot, m_n, key_a + keys, key_b + keys, PIECES, ALIGNMENT, TILE, CHUNK, True
    )
    own = lanes + i_layer * layer_stride + b_slot
    tl.store(own, b_a + tl.load(start_a + i_layer), mask=m_n)
    tl.store(own + side_stride, b_b, mask=m_n)
    if i_layer == 0:
        b_chain = tl.load(records + b_slot * COLUMNS + CHAIN, mask=m_n, other=0)
        tl.store(stamps + b_slot, b_chain, mask=m_n)
        count = tl.sum((m_n & (b_chain != tl.load(chains + o_n, mask=m_n, other=0))).to(tl.int64))
        if count > 0:
            tl.atomic_add(total, count, sem="relaxed")


@triton.jit(do_not_specialize=["phase", "stride", "window", "table_stride", "num_slots", "layer_stride"])
def _reread_kernel(
    ptrs,
    records,
    numbers,
    table,
    lengths,
    starts,
    key_a,
    start_a,
    lanes,
    stamps,
    ends,
    hits,
    total,
    num_slots,
    num_layers,
    layer_stride,
    table_stride,
    phase,
    stride,
    window,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_layer = tl.program_id(2).to(tl.int64)
    number = tl.load(numbers + i_row).to(tl.int64)
    if WHOLE:
        length = tl.load(ends + number)
        row = table + number * table_stride
    else:
        written = tl.load(starts + i_row + 1) - tl.load(starts + i_row)
        length = (tl.load(lengths + i_row) - written).to(tl.int64)
        row = table + i_row * table_stride
    if tl.load(ends + number) < 0:
        return
    o_n = phase + (tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)) * stride
    m_n = o_n < length
    if window > 0:
        m_n = m_n & (o_n > length - window)
    b_slot = tl.load(row + o_n // BLOCK_SIZE, mask=m_n, other=-1).to(tl.int64) * BLOCK_SIZE + o_n % BLOCK_SIZE
    m_n = m_n & (b_slot >= 0) & (b_slot < num_slots)
    b_chain = tl.load(records + b_slot * COLUMNS + CHAIN, mask=m_n, other=0)
    m_n = m_n & (tl.load(stamps + b_slot, mask=m_n, other=0) == b_chain)
    b_held = tl.load(lanes + i_layer * layer_stride + b_slot, mask=m_n, other=0)
    key = key_a + i_layer * WORDS
    b_lane, _ = layer_lanes(ptrs + i_layer, num_layers, b_slot, m_n, key, key, PIECES, ALIGNMENT, TILE, CHUNK, False)
    m_differs = m_n & (b_lane + tl.load(start_a + i_layer) != b_held)
    count = tl.sum(m_differs.to(tl.int64))
    if count > 0:
        tl.atomic_add(total, count, sem="relaxed")
        tl.atomic_min(hits + i_row, tl.min(tl.where(m_differs, o_n * PER_ENTRY + i_layer, NONE)), sem="relaxed")
