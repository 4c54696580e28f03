"""States: entries of layers with linear attention, which keep one state for all tokens of a row.

A state is known by what it has absorbed: how many tokens, the chain of these, and fingerprints of the bytes that it was
left with. `take_states` compares what a forward is about to go on from with what its rows are about to store;
`leave_states` notes what the forward has left. Both are the same launches in every step, and may be captured.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.record.device import MASK_32, tl, triton
from kvcanary_kernels.record.layout import Keys, signed
from kvcanary_kernels.record.rows import PoolRows
from kvcanary_kernels.watch.walk import (
    END,
    FIRST_TAIL,
    NOW_PLACE,
    NOW_ROWS,
    NOW_SITE,
    NOW_STEP,
    NOW_WIDTH,
    UID,
    Rows,
    Truth,
    context_lengths,
    live_rows,
)

#: What an entry has absorbed, where that is no number of tokens: nobody knows, nobody has it, nothing was left there.
UNKNOWN, FREED, NOTHING = map(tl.constexpr, (-1, -2, -3))
#: By number of a finding, 0 for none; of several the last one speaks.
STATE_CODES = ("", "T1", "R9", "R6", "R4", "R8", "R12", "R7", "W3", "W2", "W1")
T1, R9, R6, R4, R8, R12, R7, W3, W2, W1 = map(tl.constexpr, range(1, len(STATE_CODES)))
#: Columns of a cell: the step, the finding, the entry and that which its state comes from, how many tokens this should
#: have absorbed; how many it has, who left it, and in which step and site.
CELL_WIDTH = 8
STEP, CODE, ENTRY, SOURCE, WANTED, ABSORBED, WRITER, SITE = map(tl.constexpr, range(CELL_WIDTH))
LEFT_WIDTH = 4  # an entry, tokens absorbed, who writes, and the chain of these tokens
WIDTH = tl.constexpr(CELL_WIDTH)
CHOSEN = -1  # `block_size` of a table that says where a row goes on from, in which entry, and 1: it was copied there


class States(NamedTuple):
    """Entries that hold states, and what is known of them.

    rows:     slices of entries, entry * slices + n is the n-th
    keys:     of their fingerprints
    known:    [3, entries] int64, tokens absorbed or one of the three above, uid of who left it, step | site << 32
    chains:   [entries] int64, of these tokens
    phases:   [entries] int64, which slice is compared, where one is
    sums:     [layers, entries * slices] int64, fingerprints
    slices:   of an entry
    compared: how many of them are: all, one, or none
    null_entries: the first so many are nobody's
    moved:    site of a state that was copied for nobody in particular, who may be anybody's
    zeroed:   a row that begins goes on from what lies there, zeros of no token; else nobody reads that
    counted:  a state has absorbed the tokens of its row, and is copied as it is; False: it is some words of more tokens
              than were accepted, of which a copy takes others, so that it is compared where it was left alone
    """

    rows: PoolRows
    keys: Keys
    known: Tensor
    chains: Tensor
    phases: Tensor
    sums: Tensor
    slices: int
    compared: int
    null_entries: int
    moved: int
    zeroed: bool = False
    counted: bool = True

    @property
    def num_bytes(self) -> int:
        """What is kept beside the states, in bytes."""
        return sum(own.nbytes for own in (self.known, self.chains, self.phases, self.sums))


class Taken(NamedTuple):
    """What is said of the states of one forward, of n rows at most; a row has one of its own, and may leave another.

    cells:       [ring, CELL_WIDTH, n] int64, as above
    mismatch:    [ring, layers, n] int64, 1 where the bytes of a layer differ
    left:        [LEFT_WIDTH, 2n] int64, what the forward will leave, the entry -1 for nothing; of the others from n on
    slices:      [2n * compared] int64, those that are compared, -1 for none
    kept, found: [layers, 2n * compared] int64, their fingerprints as they should be, and as they are
    """

    cells: Tensor
    mismatch: Tensor
    left: Tensor
    slices: Tensor
    kept: Tensor
    found: Tensor


def taken_of(states: States, ring: int, n: int) -> Taken:
    """Room for forwards of n rows."""
    layers, device = len(states.sums), states.known.device
    most = 2 * n * states.compared
    shapes = (ring, CELL_WIDTH, n), (ring, layers, n), (LEFT_WIDTH, 2 * n), (most,), (layers, most), (layers, most)
    return Taken(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))


def take_states(
    states: States,
    rows: Rows,
    truth: Truth,
    taken: Taken,
    *,
    now: Tensor,
    total: Tensor,
    seeds: Tensor,
    block_size: int,
    checkpoints: int = 0,
    stored: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Judge the states that a forward goes on from, behind `advance`. No allocation, no wait.

    rows:        in batch order; column (tokens - 1) // block_size of its table is the entry of so many tokens. What a
                 row goes on from lies in that of all its tokens, and has been copied there from that of those before
    now:         [>= NOW_WIDTH] int64, the step
    total:       [1] int64, grows by the number of rows that are wrong
    seeds:       [>= rows, 2] of `advance`
    block_size:  0: there is one column;  CHOSEN: what `choose` has made of a table
    checkpoints: a prompt leaves one more state: after the last multiple of so many tokens before its end, in the column
                 before its last, where it goes through that; 0: none. Where it does, what is not left is -1
    stored:      [ring, tokens] chains of what the forward stores, for these
    """
    size, layers = len(rows.numbers), len(states.sums)
    compared = size * states.compared
    slices, found = taken.slices[:compared], taken.found[:, :compared]
    if launches:
        stored = seeds if stored is None else stored
        _take_kernel[(size, max(states.compared, 1))](
            *states[2:6], *rows[:4], truth.lines, stored, seeds, now, taken.cells, taken.left, taken.slices, taken.kept,
            states.known.shape[1], rows.table.shape[1], rows.table.stride(0), truth.lines.shape[1], stored.stride(0),
            taken.cells.shape[2], states.sums.stride(0), taken.kept.stride(0), layers, block_size, checkpoints,
            states.null_entries, states.moved, ZEROED=states.zeroed, COUNTED=states.counted, SLICES=states.slices,
            COMPARED=states.compared, BLOCK_L=triton.next_power_of_2(layers),
        )  # fmt: skip
        if compared:
            fingerprint(states.rows, slices, states.keys, fingerprint_a=found)
        _judge_kernel[(size,)](
            states.phases, states.sums, now, total, taken.cells, taken.mismatch, taken.slices, taken.kept, taken.found,
            taken.cells.shape[2], states.sums.stride(0), taken.kept.stride(0), layers, ZEROED=states.zeroed,
            SLICES=states.slices, COMPARED=states.compared, BLOCK_L=triton.next_power_of_2(layers),
        )  # fmt: skip
        return
    _, _, step, *_ = now[:NOW_WIDTH].tolist()
    live, place = live_rows(rows, now)
    numbers, past = live.numbers.long(), context_lengths(live)
    n, ends, begins = len(numbers), live.lengths[: len(numbers)].long(), past == 0
    first, last = (columns_of(counts, block_size) for counts in (past, ends))
    if block_size == CHOSEN:
        first, last = 1 - rows.table[:n, 2], torch.ones_like(past)
    entries = entry_at(rows.table, last)
    sources = torch.where(begins, entries, entry_at(rows.table, first))
    is_outside = (torch.minimum(entries, sources) < 0) | (torch.maximum(entries, sources) >= states.known.shape[1])
    sources, entries = (torch.where(is_outside, 0, own) for own in (sources, entries))
    absorbed, writers, sites = states.known[:, sources]
    if not states.counted:
        absorbed = torch.where(first != last, UNKNOWN.value, absorbed)
    is_left, is_here = (absorbed >= 0) & (~begins | states.zeroed), sources == entries
    chains, is_known = seeds[:n].unbind(1)
    codes = torch.zeros_like(entries)
    for code, is_wrong in (
        (R6, is_left & states.counted & (is_known != 0) & (states.chains[sources] != chains)),
        (R4, is_left & states.counted & (absorbed != past)),
        (R8, is_left & is_here & (writers != truth.uids[numbers]) & (sites >> 32 != states.moved)),
        (R12, (absorbed == NOTHING.value) & ~begins),
        (R7, absorbed == FREED.value),
        (W3, (first != last) & states.counted & is_here & ~begins),
        (W2, entries < states.null_entries),
        (W1, is_outside),
    ):
        codes.masked_fill_(is_wrong, code.value)
    left, others = taken.left.unflatten(1, (2, -1))[:, :, :size].unbind(1)
    left[0], others[0] = -1, -1
    own = torch.where(is_outside, -1, entries), truth.ends[numbers], truth.uids[numbers], truth.tails[numbers, 0]
    left[:, :n] = torch.stack(own)
    if checkpoints and stored is not None:
        others[:, :n] = _left_between(states, live, truth, ends, block_size, checkpoints, stored[place])
    differs = torch.zeros(layers, n, dtype=torch.int64, device=entries.device)
    if compared:
        differs[:] = _differ(states, slices, found, sources, torch.where(is_outside, -1, entries)) & is_left
    by_bytes = torch.full_like(codes, T1.value).masked_fill_(is_here, R9.value)
    by_bytes.masked_fill_(is_here & (absorbed == 0), R12.value)
    codes = torch.where((codes == 0) & differs.any(0), by_bytes, codes)
    total += codes.count_nonzero()
    said = torch.full_like(entries, step), codes, entries, sources, past, absorbed, writers, sites
    taken.cells[place, :, :n], taken.mismatch[place, :, :n] = torch.stack(said), differs


def _left_between(
    states: States, rows: Rows, truth: Truth, ends: Tensor, block_size: int, checkpoints: int, stored: Tensor
) -> Tensor:
    """[LEFT_WIDTH, n] what rows leave within their prompts; ends: [n] their tokens;  stored: [tokens] chains."""
    past, numbers = context_lengths(rows), rows.numbers.long()
    counts, columns = (ends - 1) // checkpoints * checkpoints, columns_of(ends, block_size) - 1
    entries = entry_at(rows.table, columns.clamp(min=0))
    is_block = (entries >= states.null_entries) & (entries < states.known.shape[1])
    is_left = is_block & (counts > past) & (columns > torch.where(past == 0, -1, columns_of(past, block_size)))
    at = (rows.starts[: len(numbers)].long() + counts - past - 1).clamp(min=0)
    return torch.stack((torch.where(is_left, entries, -1), counts, truth.uids[numbers], stored[at] * is_left))


def _differ(states: States, slices: Tensor, found: Tensor, sources: Tensor, entries: Tensor) -> Tensor:
    """[layers, n] bool: the bytes of entries [n] are not those that sources [n] were left with, as they are to be from
    now on. Entry -1: nothing is compared. slices, found: as in `Taken`, of n rows and padding
    """
    n, is_inside = len(entries), entries >= 0
    every = torch.arange(states.slices, device=entries.device).expand(n, -1)
    phases = every if states.compared == states.slices else states.phases[sources, None]
    kept = states.sums[:, sources[:, None] * states.slices + phases]
    chosen = torch.where(is_inside[:, None], entries[:, None] * states.slices + phases, -1)
    slices.fill_(-1).view(-1, states.compared)[:n] = chosen
    fingerprint(states.rows, slices, states.keys, fingerprint_a=found, launches=False)
    if states.compared == 1:
        states.phases[entries[is_inside]] = phases[is_inside, 0]
    states.sums[:, chosen[is_inside]] = kept[:, is_inside]
    return (found.view(len(found), -1, states.compared)[:, :n] != kept).any(2) & is_inside


take_states_torch = partial(take_states, launches=False)


def leave_states(
    states: States, taken: Taken, now: Tensor, *, n: int, between: bool = False, launches: bool = True
) -> None:
    """Note what the forward has left that took states; nobody's in an entry that nobody has. No allocation, no wait.

    n:       rows, padding included, of `take_states`
    between: it leaves others within its prompts
    """
    parts, most = 1 + between, taken.cells.shape[2]
    compared = parts * n * states.compared
    slices, found = taken.slices[:compared], taken.found[:, :compared]
    if launches:
        _leave_kernel[(n, max(states.compared, 1), parts)](
            states.known, states.chains, states.phases, taken.left, taken.slices, now, states.known.shape[1], most,
            SLICES=states.slices, COMPARED=states.compared,
        )  # fmt: skip
        if compared:
            fingerprint(states.rows, slices, states.keys, fingerprint_a=found)
            layers = len(states.sums)
            _keep_sums_kernel[(compared,)](
                states.sums, taken.slices, taken.found, states.sums.stride(0), taken.found.stride(0), layers,
                BLOCK_L=triton.next_power_of_2(layers),
            )  # fmt: skip
        return
    _, _, step, site, *_ = now[:NOW_WIDTH].tolist()
    left = taken.left.unflatten(1, (2, most))[:, :parts, :n].flatten(1)
    entries, ends, writers, chains = left[:, left[0] >= 0]
    own = torch.full_like(ends, signed((step & MASK_32.value) | site << 32))
    ends = torch.where(states.known[0, entries] == FREED.value, FREED.value, ends)
    states.known[:, entries], states.chains[entries] = torch.stack((ends, writers, own)), chains
    states.phases[entries] = step % states.slices
    if compared:
        every = torch.arange(states.slices, device=entries.device)
        phases = every if states.compared == states.slices else every[step % states.slices :][:1]
        own = torch.where(left[0, :, None] < 0, -1, left[0, :, None] * states.slices + phases)
        slices[:] = own.flatten()
        fingerprint(states.rows, slices, states.keys, fingerprint_a=found, launches=False)
        states.sums[:, slices[slices >= 0]] = found[:, slices >= 0]


leave_states_torch = partial(leave_states, launches=False)


def columns_of(counts: Tensor, block_size: int) -> Tensor:
    """[n] in which column of a table the state lies that has absorbed so many tokens."""
    return (counts - 1).clamp(min=0) // block_size if block_size else torch.zeros_like(counts)


def entry_at(table: Tensor, columns: Tensor) -> Tensor:
    """[n] int64 what a table [>= n, width] has there; -1 behind its end."""
    held = table[: len(columns)].gather(1, columns[:, None].clamp(max=table.shape[1] - 1))[:, 0].long()
    return torch.where(columns < table.shape[1], held, -1)


@triton.jit(
    do_not_specialize=[
        *("num_entries", "table_width", "table_stride", "truth_stride", "stored_stride", "most", "sums_stride"),
        *("kept_stride", "num_layers", "page_size", "checkpoints", "null_slots", "site"),
    ],
    do_not_specialize_on_alignment=["numbers", "table", "lengths", "starts", "stored"],
)
def _take_kernel(
    known,
    chains,
    phases,
    sums,
    numbers,
    table,
    lengths,
    starts,
    truth,
    stored,
    seeds,
    now,
    cells,
    left,
    slices,
    kept,
    num_entries,
    table_width,
    table_stride,
    truth_stride,
    stored_stride,
    most,
    sums_stride,
    kept_stride,
    num_layers,
    page_size,
    checkpoints,
    null_slots,
    site,
    ZEROED: tl.constexpr,
    COUNTED: tl.constexpr,
    SLICES: tl.constexpr,
    COMPARED: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """What was known of the state of one row, and one of the slices that will be compared."""
    i_row = tl.program_id(0).to(tl.int64)
    i_slice = tl.program_id(1).to(tl.int64)
    is_first = i_slice == 0
    own = slices + i_row * COMPARED + i_slice
    if i_row >= tl.load(now + NOW_ROWS):
        tl.store(left + i_row, -1)
        tl.store(left + most + i_row, -1)
        if COMPARED > 0:
            tl.store(own, -1)
        return
    line = truth + tl.load(numbers + i_row).to(tl.int64) * truth_stride
    start = tl.load(starts + i_row).to(tl.int64)
    end = tl.load(lengths + i_row).to(tl.int64)
    past = end - (tl.load(starts + i_row + 1).to(tl.int64) - start)
    begins = past == 0
    size = tl.maximum(page_size, 1)
    first = tl.where(page_size > 0, tl.maximum(past - 1, 0) // size, 0)
    last = tl.where(page_size > 0, tl.maximum(end - 1, 0) // size, 0)
    row = table + i_row * table_stride
    if page_size < 0:
        first, last = 1 - tl.load(row + 2).to(tl.int64), tl.full((), 1, tl.int64)
    entry = tl.load(row + last, mask=last < table_width, other=-1).to(tl.int64)
    source = tl.load(row + first, mask=first < table_width, other=-1).to(tl.int64)
    source = tl.where(begins, entry, source)
    is_outside = (tl.minimum(entry, source) < 0) | (tl.maximum(entry, source) >= num_entries)
    entry, source = tl.where(is_outside, 0, entry), tl.where(is_outside, 0, source)
    if COMPARED > 0:
        phase = i_slice if COMPARED == SLICES else tl.load(phases + source)
        o_l = tl.arange(0, BLOCK_L).to(tl.int64)
        b_kept = tl.load(sums + o_l * sums_stride + source * SLICES + phase, mask=o_l < num_layers, other=0)
        tl.store(kept + o_l * kept_stride + i_row * COMPARED + i_slice, b_kept, mask=o_l < num_layers)
        tl.store(own, tl.where(is_outside, -1, entry * SLICES + phase))
    if is_first:
        absorbed = tl.load(known + source)
        if not COUNTED:
            absorbed = tl.where(first != last, UNKNOWN, absorbed)
        writer = tl.load(known + num_entries + source)
        left_at = tl.load(known + 2 * num_entries + source)
        uid = tl.load(line + UID)
        is_left = (absorbed >= 0) & ((past != 0) | ZEROED)
        is_here = source == entry
        is_known = tl.load(seeds + 2 * i_row + 1) != 0
        code = tl.where(COUNTED & is_left & is_known & (tl.load(chains + source) != tl.load(seeds + 2 * i_row)), R6, 0)
        code = tl.where(COUNTED & is_left & (absorbed != past), R4, code)
        code = tl.where(is_left & is_here & (writer != uid) & (left_at >> 32 != site), R8, code)
        code = tl.where((absorbed == NOTHING) & (past != 0), R12, code)
        code = tl.where(absorbed == FREED, R7, code)
        code = tl.where(COUNTED & (first != last) & is_here & (past != 0), W3, code)
        code = tl.where(entry < null_slots, W2, code)
        code = tl.where(is_outside, W1, code)
        cell = cells + tl.load(now + NOW_PLACE) * WIDTH * most + i_row
        tl.store(cell + STEP * most, tl.load(now + NOW_STEP))
        tl.store(cell + CODE * most, code.to(tl.int64))
        tl.store(cell + ENTRY * most, entry)
        tl.store(cell + SOURCE * most, source)
        tl.store(cell + WANTED * most, past)
        tl.store(cell + ABSORBED * most, absorbed)
        tl.store(cell + WRITER * most, writer)
        tl.store(cell + SITE * most, left_at)
        tl.store(left + i_row, tl.where(is_outside, -1, entry))
        tl.store(left + 2 * most + i_row, tl.load(line + END))
        tl.store(left + 4 * most + i_row, uid)
        tl.store(left + 6 * most + i_row, tl.load(line + FIRST_TAIL))
        if checkpoints > 0:
            count = tl.maximum(end - 1, 0) // checkpoints * checkpoints
            column, before = last - 1, tl.where(begins, -1, first)
            between = tl.load(row + column, mask=(column >= 0) & (column < table_width), other=-1).to(tl.int64)
            is_block = (between >= null_slots) & (between < num_entries)
            is_between = is_block & (count > past) & (column > before)
            at = stored + tl.load(now + NOW_PLACE) * stored_stride + start + count - past - 1
            tl.store(left + most + i_row, tl.where(is_between, between, -1))
            tl.store(left + 3 * most + i_row, count)
            tl.store(left + 5 * most + i_row, uid)
            tl.store(left + 7 * most + i_row, tl.load(at, mask=is_between, other=0))
        else:
            tl.store(left + most + i_row, -1)


@triton.jit(do_not_specialize=["most", "sums_stride", "kept_stride", "num_layers"])
def _judge_kernel(
    phases,
    sums,
    now,
    total,
    cells,
    mismatch,
    slices,
    kept,
    found,
    most,
    sums_stride,
    kept_stride,
    num_layers,
    ZEROED: tl.constexpr,
    SLICES: tl.constexpr,
    COMPARED: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Whether the bytes of one row's state are those that it was left with; they are to be so from now on."""
    i_row = tl.program_id(0).to(tl.int64)
    if i_row >= tl.load(now + NOW_ROWS):
        return
    place = tl.load(now + NOW_PLACE)
    cell = cells + place * WIDTH * most + i_row
    code, entry = tl.load(cell + CODE * most), tl.load(cell + ENTRY * most)
    o_l = tl.arange(0, BLOCK_L).to(tl.int64)
    m_l = o_l < num_layers
    b_differs = tl.zeros([BLOCK_L], tl.int32)
    for i_slice in range(COMPARED):
        slice_of = tl.load(slices + i_row * COMPARED + i_slice)
        if slice_of >= 0:
            own = o_l * kept_stride + i_row * COMPARED + i_slice
            b_kept = tl.load(kept + own, mask=m_l, other=0)
            b_differs |= (tl.load(found + own, mask=m_l, other=0) != b_kept).to(tl.int32)
            tl.store(sums + o_l * sums_stride + slice_of, b_kept, mask=m_l)
            if COMPARED == 1:
                tl.store(phases + entry, slice_of % SLICES)
    absorbed = tl.load(cell + ABSORBED * most)
    is_left = (absorbed >= 0) & ((tl.load(cell + WANTED * most) != 0) | ZEROED)
    b_differs = tl.where(is_left, b_differs, 0)
    tl.store(mismatch + (place * num_layers + o_l) * most + i_row, b_differs.to(tl.int64), mask=m_l)
    if (code == 0) & (tl.max(b_differs) != 0):
        code = tl.where(absorbed == 0, R12, R9)
        code = tl.where(tl.load(cell + SOURCE * most) == entry, code, T1).to(tl.int64)
        tl.store(cell + CODE * most, code)
    if code != 0:
        tl.atomic_add(total, 1, sem="relaxed")


@triton.jit(do_not_specialize=["num_entries", "most"])
def _leave_kernel(
    known, chains, phases, left, slices, now, num_entries, most, SLICES: tl.constexpr, COMPARED: tl.constexpr
):
    """One row's state, or the other one that it leaves: what this has absorbed, and one of its slices."""
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_slice = tl.program_id(1).to(tl.int64)
    own = slices + (i_part * tl.num_programs(0) + i_row) * COMPARED + i_slice
    state = left + i_part * most + i_row
    entry, step = tl.load(state), tl.load(now + NOW_STEP)
    if entry < 0:
        if COMPARED > 0:
            tl.store(own, -1)
        return
    if COMPARED > 0:
        tl.store(own, entry * SLICES + (i_slice if COMPARED == SLICES else step % SLICES))
    if i_slice == 0:
        ends = tl.load(state + 2 * most)
        tl.store(known + entry, tl.where(tl.load(known + entry) == FREED, FREED, ends))
        tl.store(known + num_entries + entry, tl.load(state + 4 * most))
        tl.store(known + 2 * num_entries + entry, (step & MASK_32) | tl.load(now + NOW_SITE) << 32)
        tl.store(chains + entry, tl.load(state + 6 * most))
        tl.store(phases + entry, step % SLICES)


@triton.jit(do_not_specialize=["sums_stride", "found_stride", "num_layers"])
def _keep_sums_kernel(sums, slices, found, sums_stride, found_stride, num_layers, BLOCK_L: tl.constexpr):
    i_slice = tl.program_id(0).to(tl.int64)
    slice_of = tl.load(slices + i_slice)
    if slice_of < 0:
        return
    o_l = tl.arange(0, BLOCK_L).to(tl.int64)
    m_l = o_l < num_layers
    b_found = tl.load(found + o_l * found_stride + i_slice, mask=m_l, other=0)
    tl.store(sums + o_l * sums_stride + slice_of, b_found, mask=m_l)
