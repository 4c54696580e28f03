"""Take and reread: fingerprints of what a forward stored, and whether it is finite; the same bytes read again along
block tables.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import join, keyed_sums, layer_fingerprints
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.device import CHAIN, COLUMNS, TOKEN_POSITION, low_word, num_units, tl, triton
from kvcanary_kernels.record.formats import format_constants, lanes_of, words_not_finite
from kvcanary_kernels.record.layout import Keys
from kvcanary_kernels.record.rows import PoolRows
from kvcanary_kernels.record.table import PageTable, device_slot_at, slot_at
from kvcanary_kernels.watch.advance import FILLED, FILLED_STAMP
from kvcanary_kernels.watch.walk import (
    END,
    NONE,
    NOW_PLACE,
    NOW_ROWS,
    NOW_TOKENS,
    NOW_WIDTH,
    TURN,
    Rows,
    Truth,
    Watched,
    context_lengths,
    device_first_seen,
    first_seen,
    lines_of,
    live_rows,
)

LAYERS_PER_ENTRY = 128  # a violation of `reread` is position * LAYERS_PER_ENTRY + layer
SLOTS_PER_ENTRY = 1 << 34  # and beside it, position * SLOTS_PER_ENTRY + slot
ENTRIES_PER_LAYER = 1 << 34  # what `take` finds first is layer * ENTRIES_PER_LAYER + entry
NOT_FINITE, NOT_STORED = 0, 1  # where it stands among the cells of a step
PER_LAYER = tl.constexpr(ENTRIES_PER_LAYER)
PER_UNIT = 8  # programs at a time, which share out what is read of all rows and layers
PER_ENTRY = tl.constexpr(LAYERS_PER_ENTRY)
PLACES = tl.constexpr(SLOTS_PER_ENTRY)


class Before(NamedTuple):
    """What layers held before a forward stored into them, as far as it tells whether that arrived.

    is_another: as of `Overwritten`, whose bit `pool` is that of these layers
    zeros:      [layers] int64, written: the first token whose entry holds nothing but zeros, plus one; 0: there is none
    first:      layers below it see a token alone, so that tokens with one embedding have the same K and V there: only a
                pattern that is still there (FILLED_STAMP) says that such a layer stored nothing
    """

    is_another: Tensor
    pool: int
    zeros: Tensor
    first: int = 1


def take(
    watched: Watched,
    pool: PoolRows,
    slots: Tensor,
    chains: Tensor,
    keys: Keys,
    *,
    fingerprints: Tensor,
    stamps: Tensor,
    most: int | None = None,
    firsts: Tensor | None = None,
    asks_finite: bool = True,
    before: Before | None = None,
    launches: bool = True,
) -> None:
    """Take both fingerprints of the slots of this step as they lie in the pool now. No allocation, no wait.

    slots:  [ring, >= n] int64, -1: nothing;  chains: [ring, >= n] int64, what the record of each should say
    fingerprints:  [2, layers, num_slots] int64, written
    stamps: [num_slots] int64, written: the chain of the record whose bytes these are
    most:   at least the tokens that `now` says; None: as many as a line has
    firsts: [ring, 2] int64, NO_VIOLATION or lower before: in the cells of this step the least of layer *
            ENTRIES_PER_LAYER + entry at which an element is NaN or infinite (N1), if `asks_finite`; and at which
            nothing was stored (R12), where `before` is given. None: nobody asks
    Entries whose record is another's count as wrong (W4: one forward wrote the slot twice), and layers of entries that
    are not finite, or in which nothing was stored: they hold what another token had there, or nothing but zeros, which
    an earlier entry of another token had, too (of the first layers see `Before`).
    """
    total = watched.total
    if launches:
        most = slots.shape[1] if most is None else most
        tiling = pool.tiling_of(most)
        _take_fingerprints_kernel[(triton.cdiv(most, tiling["TILE"]), pool.num_layers)](
            pool.ptrs,
            watched.records,
            slots,
            chains,
            watched.now,
            keys.fingerprint_a,
            keys.fingerprint_b,
            keys.start_a,
            fingerprints,
            stamps,
            total,
            slots.stride(0),
            pool.num_slots,
            pool.num_layers,
            fingerprints.stride(0),
            fingerprints.stride(1),
            total if firsts is None else firsts,
            *((0, 0) if firsts is None else firsts.stride()),
            *((total, 0, total, 0) if before is None else before),
            0 if before is None else before.is_another.stride(0),
            FORMATS=None if firsts is None or not asks_finite else format_constants(pool),
            ASKS_STORED=firsts is not None and before is not None,
            **tiling,
        )
        return
    records = watched.records
    _, n, _, _, place, *_ = watched.now[:NOW_WIDTH].tolist()
    slots, chains = slots[place, :n], chains[place, :n]
    (entries,) = (slots >= 0).nonzero(as_tuple=True)
    slots, chains = slots[entries], chains[entries]
    held, was_filled = fingerprints[:, :, slots], stamps[slots] == FILLED_STAMP
    found = both_fingerprints(pool, slots, keys)
    fingerprints[:, :, slots] = found
    stamps[slots] = records[slots, record.CHAIN]
    total += (records[slots, record.CHAIN] != chains).sum()
    if firsts is None:
        return
    wrong: dict[int, Tensor] = {}  # [layers, n] by cell
    if asks_finite:
        rows = [pool.gather_layer(layer, slots) for layer in range(pool.num_layers)]
        wrong[NOT_FINITE] = torch.stack([words_not_finite(own, lanes_of(pool)).any(1) for own in rows])
    if before is not None:
        tokens = records[slots, record.TOKEN_POSITION] & record.MASK_32
        is_asked = (torch.arange(pool.num_layers, device=slots.device) >= before.first)[:, None]
        is_another = torch.where(is_asked, before.is_another[place, entries] >> before.pool & 1 != 0, was_filled)
        is_zero = are_zeros(found, keys) & is_asked
        for layer, entry in zip(*is_zero.nonzero(as_tuple=True), strict=True):
            if not before.zeros[layer]:
                before.zeros[layer] = tokens[entry] + 1
        is_same = (found == held).all(0) & is_another
        wrong[NOT_STORED] = is_same | is_zero & (tokens + 1 != before.zeros[:, None])
    for cell, bad in wrong.items():
        layer, entry = bad.nonzero(as_tuple=True)
        total += len(layer)
        firsts[place, cell] = min([int(firsts[place, cell]), *(layer * ENTRIES_PER_LAYER + entries[entry]).tolist()])


take_torch = partial(take, launches=False)


def reread(
    watched: Watched,
    pool: PoolRows,
    rows: Rows,
    keys: Keys,
    *,
    fingerprints: Tensor,
    stamps: Tensor,
    truth: Truth,
    stride: int,
    whole: bool,
    violations: Tensor,
    counted: Tensor,
    launches: bool = True,
) -> None:
    """Compare fingerprint a of the entries at every `stride`-th position of every row (R9). No allocation, no wait.

    Each row's own turns say where they begin: any `stride` of its forwards see each position once, whatever comes
    between. Entries whose bytes nobody took under the record that lies there now are not judged.

    whole:      False: what each row had before this forward. True: all that is recorded of it (truth.ends), along the
                line of the table that has its number; lengths and starts are not read
    violations:       [ring, 2, >= rows] int64, NO_VIOLATION or lower before; in the cells of this step the least of
                position * LAYERS_PER_ENTRY + layer of each row, and of position * SLOTS_PER_ENTRY + slot
    counted:    [1] int64, grows by the number of entries that were read, each once for all layers
    """
    if launches:
        n, longest = rows.numbers.shape[0], rows.table.shape[1] * watched.block_size
        most = triton.cdiv(n * triton.cdiv(longest, stride), pool.tile) * pool.num_layers
        _reread_kernel[(min(most, PER_UNIT * num_units(rows.numbers.device)),)](
            pool.ptrs,
            watched.records,
            *rows[:4],
            watched.now,
            keys.fingerprint_a,
            keys.start_a,
            fingerprints,
            stamps,
            truth.lines,
            violations,
            watched.total,
            counted,
            violations.stride(1),
            violations.stride(0),
            pool.num_slots,
            pool.num_layers,
            fingerprints.stride(1),
            rows.table.shape[1],
            rows.table.stride(0),
            truth.lines.shape[1],
            stride,
            watched.window,
            ROW_BITS=(n - 1).bit_length(),
            PAGE=watched.block_size,
            WHOLE=whole,
            IN_PLACE=whole or rows.in_place,
            **pool.tiling,
        )
        return
    records, _, block_size, window, now, total, *_ = watched
    rows, place = live_rows(rows, now)
    numbers = rows.numbers.long()
    ends, phases = truth.ends[numbers], truth.turns[numbers] % stride
    sizes = (ends if whole else context_lengths(rows)).clamp(max=rows.table.shape[1] * block_size) * (ends >= 0)
    positions = torch.arange(0, max([0, *sizes.tolist()]), stride, device=records.device) + phases[:, None]
    live = positions < sizes[:, None]
    live &= positions >= first_seen(sizes, window)[:, None]
    row, column = live.nonzero(as_tuple=True)
    position = positions[row, column]
    lines = numbers if whole else lines_of(rows)
    slots = slot_at(PageTable(rows.table, block_size), lines[row], position)
    safe = slots.clamp(0, pool.num_slots - 1)
    is_taken = (slots == safe) & (stamps[safe] == records[safe, record.CHAIN]) & (stamps[safe] != 0)
    row, position, slots = row[is_taken], position[is_taken], slots[is_taken]
    counted += len(slots)
    if not len(slots):
        return
    layer, entry = (both_fingerprints(pool, slots, keys)[0] != fingerprints[0, :, slots]).nonzero(as_tuple=True)
    total += len(entry)
    row, position, slots = row[entry], position[entry], slots[entry]
    for cell, violation in enumerate((position * LAYERS_PER_ENTRY + layer, position * SLOTS_PER_ENTRY + slots)):
        violations[place, cell].scatter_reduce_(0, row, violation, "amin")


reread_torch = partial(reread, launches=False)


def both_fingerprints(pool: PoolRows, slots: Tensor, keys: Keys) -> Tensor:
    """[2, layers, n] int64: both fingerprints of every layer of valid slots."""
    pieces = keys.pieces.shape[2] // 2
    sums = keyed_sums(pool.gather(slots), keys.pieces)
    fingerprint_a = join(sums[..., :pieces], keys) + keys.start_a[:, None]
    return torch.stack((fingerprint_a, join(sums[..., pieces:], keys)))


def are_zeros(fingerprints: Tensor, keys: Keys) -> Tensor:
    """[layers, n] bool: both fingerprints [2, layers, n] are those of nothing but zeros."""
    return (fingerprints[0] == keys.start_a[:, None]) & (fingerprints[1] == 0)


@triton.jit(
    do_not_specialize=[
        "slots_stride",
        "num_slots",
        "firsts_stride",
        "cells_stride",
        "pool_bit",
        "first_asked",
        "another_stride",
    ]
)
def _take_fingerprints_kernel(
    ptrs,
    records,
    slots,
    chains,
    now,
    key_a,
    key_b,
    start_a,
    fingerprints,
    stamps,
    total,
    slots_stride,
    num_slots,
    num_layers,
    side_stride,
    layer_stride,
    firsts,
    firsts_stride,
    cells_stride,
    is_another,
    pool_bit,
    zeros,
    first_asked,
    another_stride,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    FORMATS: tl.constexpr,
    ASKS_STORED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i_layer = tl.program_id(1).to(tl.int64)
    n = tl.load(now + NOW_TOKENS)
    if tl.program_id(0).to(tl.int64) * TILE >= n:
        return
    line = tl.load(now + NOW_PLACE) * slots_stride
    b_slot = tl.load(slots + line + o_n, mask=o_n < n, other=-1)
    m_n = (b_slot >= 0) & (b_slot < num_slots)
    keys = i_layer * WORDS
    own = fingerprints + i_layer * layer_stride + b_slot
    if ASKS_STORED:  # here, so that they come while the rows do
        b_held_a, b_held_b = tl.load(own, mask=m_n, other=0), tl.load(own + side_stride, mask=m_n, other=0)
        another = is_another + tl.load(now + NOW_PLACE) * another_stride
        m_another = (tl.load(another + o_n, mask=m_n, other=0) >> pool_bit) & 1 != 0
        if i_layer < first_asked:
            m_another = tl.load(stamps + b_slot, mask=m_n, other=0) == FILLED
    b_a, b_b, b_bad = layer_fingerprints(
        ptrs + i_layer, num_layers, b_slot, m_n, key_a + keys, key_b + keys, PIECES, ALIGNMENT, TILE, CHUNK, True,
        FORMATS,
    )  # fmt: skip
    b_found = b_a + tl.load(start_a + i_layer)
    cells = firsts + tl.load(now + NOW_PLACE) * firsts_stride
    if ASKS_STORED:
        m_same = (b_held_a == b_found) & (b_held_b == b_b)
        m_zero = m_n & (b_a == 0) & (b_b == 0) & (i_layer >= first_asked)
        m_zero = _zeros_of_another(zeros + i_layer, records, b_slot, m_zero, o_n)
        _tell_first(cells + cells_stride, total, m_n & m_same & m_another | m_zero, i_layer, o_n)
        tl.debug_barrier()  # every thread has read what is stored anew below
    tl.store(own, b_found, mask=m_n)
    tl.store(own + side_stride, b_b, mask=m_n)
    if FORMATS is not None:
        _tell_first(cells, total, m_n & b_bad, i_layer, o_n)
    if i_layer == 0:
        b_chain = tl.load(records + b_slot * COLUMNS + CHAIN, mask=m_n, other=0)
        tl.store(stamps + b_slot, b_chain, mask=m_n)
        count = tl.sum((m_n & (b_chain != tl.load(chains + line + o_n, mask=m_n, other=0))).to(tl.int64))
        if count > 0:
            tl.atomic_add(total, count, sem="relaxed")


@triton.jit
def _zeros_of_another(first, records, b_slot, m_zero, o_n):
    """Entries of nothing but zeros whose token is not that of the first one ever, which is kept as token + 1."""
    m_other = m_zero
    at = tl.min(tl.where(m_zero, o_n, NONE))
    if at < NONE:
        b_token = low_word(tl.load(records + b_slot * COLUMNS + TOKEN_POSITION, mask=m_zero, other=0)) + 1
        own = tl.max(tl.where(o_n == at, b_token, 0))
        held = tl.atomic_cas(first, own * 0, own, sem="relaxed")
        m_other = m_zero & (b_token != tl.where(held == 0, own, held))
    return m_other


@triton.jit
def _tell_first(cell, total, m_wrong, i_layer, o_n):
    """Count wrong entries of a layer, and keep the first of a step."""
    count = tl.sum(m_wrong.to(tl.int64))
    if count > 0:
        tl.atomic_add(total, count, sem="relaxed")
        tl.atomic_min(cell, tl.min(tl.where(m_wrong, i_layer * PER_LAYER + o_n, NONE)), sem="relaxed")


@triton.jit(
    do_not_specialize=[
        "side_stride",
        "violations_stride",
        "stride",
        "window",
        "table_width",
        "table_stride",
        "truth_stride",
        "num_slots",
        "layer_stride",
    ],
    do_not_specialize_on_alignment=["numbers", "table", "lengths", "starts", "now", "violations", "counted"],
)
def _reread_kernel(
    ptrs,
    records,
    numbers,
    table,
    lengths,
    starts,
    now,
    key_a,
    start_a,
    fingerprints,
    stamps,
    truth,
    violations,
    total,
    counted,
    side_stride,
    violations_stride,
    num_slots,
    num_layers,
    layer_stride,
    table_width,
    table_stride,
    truth_stride,
    stride,
    window,
    ROW_BITS: tl.constexpr,
    PAGE: tl.constexpr,
    WHOLE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    o_r = tl.arange(0, 1 << ROW_BITS)
    m_r = o_r < tl.load(now + NOW_ROWS)
    most = table_width * PAGE
    due = _due_of(numbers, lengths, starts, truth, truth_stride, stride, window, most, o_r, m_r, WHOLE)
    b_behind = tl.cumsum(due[2], 0)  # entries of a row and of those in front of it
    count = tl.max(b_behind)
    tiles = tl.cdiv(count, TILE)
    b_read = tl.zeros([TILE], tl.int32)
    # layer after layer: memory that programs read side by side should not lie far apart
    for i in range(tl.program_id(0).to(tl.int64), tiles * num_layers, tl.num_programs(0)):
        i_layer = i // tiles
        o_n = i % tiles * TILE + tl.arange(0, TILE)
        m_n = o_n < count
        b_row = _row_of(o_n, b_behind, ROW_BITS)
        b_number, b_first, b_due = _due_of(
            numbers, lengths, starts, truth, truth_stride, stride, window, most, b_row, m_n, WHOLE
        )
        o_n = b_first + (o_n - tl.gather(b_behind, b_row, 0) + b_due) * stride
        b_line = b_number if IN_PLACE else b_row.to(tl.int64)
        b_slot = device_slot_at(table + b_line * table_stride, o_n, m_n, table_width, PAGE)
        m_n = m_n & (b_slot >= 0) & (b_slot < num_slots)
        b_chain = tl.load(records + b_slot * COLUMNS + CHAIN, mask=m_n, other=0)
        m_n = m_n & (tl.load(stamps + b_slot, mask=m_n, other=0) == b_chain) & (b_chain != 0)
        b_held = tl.load(fingerprints + i_layer * layer_stride + b_slot, mask=m_n, other=0)
        key = key_a + i_layer * WORDS
        b_fingerprint, _, _ = layer_fingerprints(
            ptrs + i_layer, num_layers, b_slot, m_n, key, key, PIECES, ALIGNMENT, TILE, CHUNK, False
        )
        m_differs = m_n & (b_fingerprint + tl.load(start_a + i_layer) != b_held)
        b_read += (m_n & (i_layer == 0)).to(tl.int32)
        num_wrong = tl.sum(m_differs.to(tl.int64))
        if num_wrong > 0:
            tl.atomic_add(total, num_wrong, sem="relaxed")
            cell = violations + tl.load(now + NOW_PLACE) * violations_stride + b_row
            tl.atomic_min(cell, o_n * PER_ENTRY + i_layer, mask=m_differs, sem="relaxed")
            tl.atomic_min(cell + side_stride, o_n * PLACES + b_slot, mask=m_differs, sem="relaxed")
    num_read = tl.sum(b_read.to(tl.int64))
    if num_read > 0:
        tl.atomic_add(counted, num_read, sem="relaxed")


@triton.jit
def _due_of(numbers, lengths, starts, truth, truth_stride, stride, window, most, o_r, m_r, WHOLE: tl.constexpr):
    """Of rows: their numbers, the first position of each that is due in this forward, and how many are; most: entries
    that a row's table has, whatever an engine says of its length.
    """
    b_number = tl.load(numbers + o_r, mask=m_r, other=0).to(tl.int64)
    line = truth + b_number * truth_stride
    b_end = tl.load(line + END, mask=m_r, other=-1)
    b_length = b_end
    if not WHOLE:
        b_written = tl.load(starts + o_r + 1, mask=m_r, other=0) - tl.load(starts + o_r, mask=m_r, other=0)
        b_length = (tl.load(lengths + o_r, mask=m_r, other=0) - b_written).to(tl.int64)
    b_phase = tl.load(line + TURN, mask=m_r, other=0) % stride
    b_first = b_phase + tl.cdiv(tl.maximum(device_first_seen(b_length, window) - b_phase, 0), stride) * stride
    b_due = tl.where(b_end >= 0, tl.cdiv(tl.maximum(tl.minimum(b_length, most) - b_first, 0), stride), 0)
    return b_number, b_first, b_due


@triton.jit
def _row_of(o_n, b_behind, BITS: tl.constexpr):
    """Which row has the entry o_n [TILE] of all; b_behind [1 << BITS]: entries of a row and of those in front."""
    b_row = tl.zeros_like(o_n).to(tl.int32)
    for i_bit in tl.static_range(BITS - 1, -1, -1):
        b_row += tl.where(tl.gather(b_behind, b_row + ((1 << i_bit) - 1), 0) <= o_n, 1 << i_bit, 0)
    return b_row
