"""Walk: the rows of block tables, where nobody tells of grants and frees and records speak for themselves.

An engine that is only watched has rows, lengths and tokens, but its canary is never told who owns a page. So a row is
judged by what its records say, as in `verify`: each continues the one before it, at its own position. In place of
grants, the last one must end in the chain that the canary has followed by itself, from the tokens that were fed.
`advance` records what a forward writes, before it does; `walk` judges what it reads, since rows of one forward may read
what others write in it.

What changes from step to step lies on the device, in `now`: launches are the same in every step, and may be captured.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.judge.verify import NO_PREDECESSOR, ROOT, judge_record, refused_or, verify_torch
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.device import BLOCK, R6, R7, R8, R10, R12, tl, triton
from kvcanary_kernels.record.layout import CODE_BITS, Keys
from kvcanary_kernels.record.table import PageTable, device_slot_at, segment_entries, slot_at

#: A violation is position * BITS_PER_ENTRY + the bits of all codes of the entry there, as `violation_bit` has them.
BITS_PER_ENTRY = 1 << 16
#: Of several codes at one place the first of these speaks.
VIOLATION_CODES = ("R10", "R1", "R2", "R12", "R3", "R7", "R8", "R4", "R5", "R6", "W1", "W7", "W2", "W3", "W5", "W6")
NO_VIOLATION = (1 << 63) - 1
NOT_FOLLOWED = -1  # end of a row whose tokens nobody knows
#: All may read what is at or below: one row may write it as well, SHARED_WRITER - uid, or nothing is known of it.
SHARED_WRITER, UNJUDGED = map(tl.constexpr, (-(1 << 32), -(1 << 62)))
#: Owners of a slot that was never granted, of one that rows share, and of one that was given back.
NOBODYS, EVERYBODYS, GIVEN_BACK = map(tl.constexpr, (0, -1, -2))
SPLITS = 8  # shares of a row that are judged side by side
#: Columns of `now` [NOW_WIDTH] int64: how many rows and tokens the forward has, which step it is, its site, where it
#: stands in rings, and what is added to the count that is sent with it.
NOW_WIDTH = 6
NOW_ROWS, NOW_TOKENS, NOW_STEP, NOW_SITE, NOW_PLACE, NOW_STAMP = map(tl.constexpr, range(NOW_WIDTH))
#: Columns of Truth.lines; behind them lie its tails.
TAILS = 5
END, KNOWN, ROOT_CHAIN, UID, TURN = map(tl.constexpr, range(TAILS))
FIRST_TAIL = tl.constexpr(TAILS)
VIOLATION = tl.constexpr(BITS_PER_ENTRY)
NONE = tl.constexpr(NO_VIOLATION)


class Truth:
    """What the canary knows of the engine's request rows, by row number; it follows them by itself.

    lines: [n, TAILS + T] int64, the columns below one beside the other
    ends:  [n] tokens that are recorded, accepted or not; NOT_FOLLOWED: the row is not judged
    known: [n] how many of `tails` are true
    roots: [n] chain of none
    uids:  [n] who writes, for the report
    turns: [n] grows by one with each forward that the row is in; which of its entries are read again goes by that
    tails: [n, T] chain of the first ends - i tokens
    """

    def __init__(self, lines: Tensor) -> None:
        self.lines, self.tails = lines, lines[:, TAILS:]
        self.ends, self.known, self.roots, self.uids, self.turns = lines[:, :TAILS].unbind(1)


class Watched(NamedTuple):
    """Slots that some layers share, and the step in which they are looked at.

    records:    [num_slots, 8] int64
    keys:       of identities
    block_size: slots of a block
    window:     tokens that attention sees, the reader's own included; 0: all; below 0: those of the reader's chunk, of
                -window tokens each
    now:        [>= NOW_WIDTH] int64, the step
    total:      [1] int64, grows by the number of wrong entries
    null_slots: the first so many slots are nobody's
    owners:     [num_slots] int64, the uid in Truth of the row that was granted a slot, NOBODYS, EVERYBODYS, GIVEN_BACK,
                SHARED_WRITER - uid where that row alone may write what all may read, or UNJUDGED; None: the engine does
                not tell of grants, and R7, R8, W2, W3 and W7 are not judged
    """

    records: Tensor
    keys: Keys
    block_size: int
    window: int
    now: Tensor
    total: Tensor
    null_slots: int
    owners: Tensor | None = None


class Rows(NamedTuple):
    """The rows of one forward; those at and behind the number that `now` says are padding.

    numbers: [rows] int32 or int64, where they stand in Truth
    table:   [>= rows, width] int32 or int64, block of the row's entries i * block_size and on
    lengths: [>= rows] int32 or int64, entries of each row, those that this forward writes included
    starts:  [>= rows + 1] int32 or int64, where each row's new entries begin
    in_place: the table has [rows of Truth] lines, and a row's is that of its number; False: they are in batch order
    """

    numbers: Tensor
    table: Tensor
    lengths: Tensor
    starts: Tensor
    in_place: bool = False


def walk(
    watched: Watched,
    rows: Rows,
    truth: Truth,
    *,
    seeds: Tensor,
    violations: Tensor,
    counted: Tensor,
    launches: bool = True,
) -> None:
    """Judge the entries that rows had before this forward, after `advance`: R1 to R8, R10, R12. No allocation, no wait.

    What nobody has written is R12, unless it is another's: that is R7 or R8.

    seeds:   of `advance`
    violations:    [ring, >= rows] int64, NO_VIOLATION or lower before; in the cell of this step the first violation of
                   each row
    counted: [1] int64, grows by the number of entries that were judged
    """
    if launches:
        _walk_kernel[(rows.numbers.shape[0], SPLITS)](
            watched.records,
            *rows[:4],
            watched.now,
            truth.lines,
            watched.keys.constants,
            seeds,
            violations,
            watched.total,
            counted,
            watched.records.shape[0],
            rows.table.shape[1],
            rows.table.stride(0),
            truth.lines.shape[1],
            violations.stride(0),
            watched.window,
            watched.null_slots,
            watched.records if watched.owners is None else watched.owners,
            PAGE=watched.block_size,
            IN_PLACE=rows.in_place,
            HAS_OWNERS=watched.owners is not None,
            BLOCK_N=BLOCK,
        )
        return
    records, keys, block_size, window, now, total, null_slots, owners = watched
    rows, place = live_rows(rows, now)
    numbers, past, num_slots = rows.numbers.long(), context_lengths(rows), records.shape[0]
    is_followed, is_known = truth.ends[numbers] != NOT_FOLLOWED, seeds[: len(numbers), 1] != 0
    unexplained = (is_followed & ~is_known).nonzero()[:, 0]
    tell_torch(
        violations[place], total, unexplained, past[unexplained], torch.full_like(unexplained, violation_bit("R10"))
    )
    most = rows.table.shape[1] * block_size  # one entry behind the table is judged, however many an engine says
    first = first_seen(past, window).clamp(max=most)
    lengths = (past.clamp(max=most + 1) - first).clamp(min=0) * is_followed
    row = torch.arange(len(numbers), device=past.device).repeat_interleave(lengths)
    (positions,) = segment_entries(lengths, len(row), first)
    slots, bits = slot_at(PageTable(rows.table, block_size), lines_of(rows)[row], positions), torch.zeros_like(row)
    verify_torch(
        records, slots, starts=lengths.cumsum(0) - lengths, lengths=lengths, first_positions=first,
        predecessors=torch.where(first == 0, ROOT, NO_PREDECESSOR), seeds=truth.roots[numbers],
        generations=past.new_zeros(-(-num_slots // block_size)), layers=past.new_zeros(2),
        page_size=block_size, null_slots=null_slots, pool_id=0, keys=keys, codes=bits,
    )  # fmt: skip
    held = records[slots.clamp(0, num_slots - 1)]
    is_last = is_known[row] & (positions == past[row] - 1)
    own = bits | torch.where(is_last & (held[:, record.CHAIN] != seeds[row, 0]), violation_bit("R6"), 0)
    own = torch.where(held[:, record.STEP_SITE] == 0, violation_bit("R12"), own & ~violation_bit("R12"))
    if owners is not None:
        owner = owners[slots.clamp(0, num_slots - 1)]
        is_shared = (owner == EVERYBODYS.value) | (owner <= SHARED_WRITER.value)
        is_foreign = ~is_shared & (owner != truth.uids[numbers][row])
        is_free = (owner == NOBODYS.value) | (owner == GIVEN_BACK.value)
        foreign = torch.where(is_free, violation_bit("R7"), violation_bit("R8"))
        own = torch.where(is_foreign, foreign | own & ~violation_bit("R12"), own)
    is_refused = bits & (violation_bit("R1") | violation_bit("R2")) != 0
    tell_torch(violations[place], total, row, positions, torch.where(is_refused, bits, own))
    counted += len(row)


walk_torch = partial(walk, launches=False)


def violation_bit(code: str) -> int:
    """Violations tell of reads or of writes: R<n> is bit n - 1, W<n> is bit n - 1."""
    return CODE_BITS[code] >> (32 if code.startswith("W") else 0)


def code_of(violation: int, kind: str) -> tuple[int, str]:
    """Position and first code of a violation; kind: "R" of `walk`, "W" of `advance`."""
    position, bits = divmod(violation, BITS_PER_ENTRY)
    return position, next(code for code in VIOLATION_CODES if code.startswith(kind) and bits & violation_bit(code))


def tell_torch(cells: Tensor, total: Tensor, row: Tensor, positions: Tensor, bits: Tensor) -> None:
    """The torch reference of `note` and `tell`, for entries [n] of several rows."""
    total += bits.count_nonzero()
    found = torch.where(bits != 0, positions * BITS_PER_ENTRY + bits, NO_VIOLATION)
    cells.scatter_reduce_(0, row, found, "amin")


def live_rows(rows: Rows, now: Tensor) -> tuple[Rows, int]:
    """Without padding; and the step's place in rings."""
    n, _, _, _, place, *_ = now[:NOW_WIDTH].tolist()
    return rows._replace(numbers=rows.numbers[:n]), place


def lines_of(rows: Rows) -> Tensor:
    """[rows] int64: which line of the table each row has."""
    return rows.numbers.long() if rows.in_place else torch.arange(len(rows.numbers), device=rows.numbers.device)


def context_lengths(rows: Rows) -> Tensor:
    """[rows] int64: entries that each row had before this forward."""
    n = rows.numbers.shape[0]
    starts = rows.starts[: n + 1].long()
    return rows.lengths[:n].long() - (starts[1:] - starts[:-1])


def table_slots(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """[rows, n] int64: slots of positions [rows, n] along a table [rows, width]; -1 behind its end."""
    rows = torch.arange(len(positions), device=positions.device)[:, None].expand_as(positions)
    return slot_at(PageTable(table, block_size), rows.flatten(), positions.flatten()).view_as(positions)


@triton.jit(
    do_not_specialize=[
        "num_slots",
        "table_width",
        "table_stride",
        "truth_stride",
        "violations_stride",
        "window",
        "null_slots",
    ],
    do_not_specialize_on_alignment=["numbers", "table", "lengths", "starts", "counted"],
)
def _walk_kernel(
    records,
    numbers,
    table,
    lengths,
    starts,
    now,
    truth,
    constants,
    seeds,
    violations,
    total,
    counted,
    num_slots,
    table_width,
    table_stride,
    truth_stride,
    violations_stride,
    window,
    null_slots,
    owners,
    PAGE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1).to(tl.int64)
    if i_row >= tl.load(now + NOW_ROWS):
        return
    number = tl.load(numbers + i_row).to(tl.int64)
    line = truth + number * truth_stride
    if tl.load(line + END) < 0:
        return
    past = (tl.load(lengths + i_row) - (tl.load(starts + i_row + 1) - tl.load(starts + i_row))).to(tl.int64)
    seed = tl.load(seeds + 2 * i_row)
    is_known = tl.load(seeds + 2 * i_row + 1) != 0
    root = tl.load(line + ROOT_CHAIN)
    cell = violations + tl.load(now + NOW_PLACE) * violations_stride + i_row
    most = table_width * PAGE  # one entry behind the table is judged, however many an engine says
    first, end = tl.minimum(device_first_seen(past, window), most), tl.minimum(past, most + 1)
    if i_split == 0:
        if end > first:
            tl.atomic_add(counted, end - first, sem="relaxed")
        if not is_known:
            tl.atomic_add(total, 1, sem="relaxed")
            tl.atomic_min(cell, past * VIOLATION + R10, sem="relaxed")
    row = table + (number if IN_PLACE else i_row) * table_stride
    b_violation = tl.full([BLOCK_N], NONE, tl.int64)
    b_count = tl.zeros([BLOCK_N], tl.int32)
    for i_block in range(first + i_split * BLOCK_N, end, tl.num_programs(1) * BLOCK_N):
        o_n = i_block + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        b_slot = device_slot_at(row, o_n, m_n, table_width, PAGE)
        b_before = device_slot_at(row, o_n - 1, m_n & (o_n > first), table_width, PAGE)
        _, _, b_chain, _, b_step, b_bits = judge_record(
            records, b_slot, b_before, m_n, o_n, o_n == 0, root, constants, num_slots, null_slots, 0
        )
        b_bits += tl.where((o_n == past - 1) & (b_chain != seed) & is_known, R6, 0)
        b_bits = tl.where(b_step == 0, R12, b_bits)
        if HAS_OWNERS:
            m_inside = m_n & (b_slot >= 0) & (b_slot < num_slots)
            b_owner = tl.load(owners + b_slot, mask=m_inside, other=EVERYBODYS)
            m_shared = (b_owner == EVERYBODYS) | (b_owner <= SHARED_WRITER)
            m_foreign = ~m_shared & (b_owner != tl.load(line + UID))
            m_free = (b_owner == NOBODYS) | (b_owner == GIVEN_BACK)
            b_bits = tl.where(m_foreign, tl.where(m_free, R7, R8) | (b_bits & ~R12), b_bits)
        b_bits = refused_or(b_bits, b_slot, num_slots, null_slots)
        b_violation, b_count = note(b_violation, b_count, o_n, b_bits, m_n)
    tell(cell, total, b_violation, b_count)


def first_seen(counts: Tensor, window: int) -> Tensor:
    """The first entry that a token behind so many entries sees; window: as of `Watched`."""
    if window < 0:
        return counts // -window * -window
    return (counts + 1 - window).clamp(min=0) if window else torch.zeros_like(counts)


@triton.jit
def device_first_seen(count, window):
    """`first_seen` in a kernel."""
    first = count * 0
    if window > 0:
        first = tl.maximum(count + 1 - window, 0)
    if window < 0:
        first = count // -window * -window
    return first


@triton.jit
def note(b_violation, b_count, b_position, b_bits, m_n):
    """The first violation and the number of wrong entries so far, by thread: nothing is stored where entries are
    judged.
    """
    m_wrong = m_n & (b_bits != 0)
    b_found = tl.where(m_wrong, b_position * VIOLATION + b_bits, NONE)
    return tl.minimum(b_violation, b_found), b_count + m_wrong.to(tl.int32)


@triton.jit
def tell(cell, total, b_violation, b_count):
    """Add to the count of a device, and keep the first violation of a row."""
    count = tl.sum(b_count)
    if count > 0:
        tl.atomic_add(total, count.to(tl.int64), sem="relaxed")
        tl.atomic_min(cell, tl.min(b_violation), sem="relaxed")
