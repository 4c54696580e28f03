"""Drafted states: where the states of rows lie in an engine that is watched and drafts, in the words of `states`.

A forward leaves a state behind each of a row's tokens, of which some are drafts, and the next one goes on from that of
the last one that was accepted. `choose` says which entries rows go on from and fill, `note_drafted` of what, and
`note_accepted` where the states of accepted tokens lie, and to which entries of full blocks they are copied.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record.device import tl, triton
from kvcanary_kernels.watch.states import Taken, columns_of
from kvcanary_kernels.watch.walk import NOW_PLACE, NOW_ROWS, UID, Rows, Truth, context_lengths, live_rows

BLOCK = 64
#: Columns of Places.taken and first: where a row goes on from, the entry in which it does, and 1: it was copied there.
SOURCE, ENTRY, IS_MOVED = map(tl.constexpr, range(3))
#: Columns of Places.rows, and of Places.held.
NUMBER, WRITER, PAST, COLUMN = map(tl.constexpr, range(4))
HELD_BY, HELD_IN, HELD_AT, IS_LATER = map(tl.constexpr, range(4))


class Draft(NamedTuple):
    """Which entries the rows of a forward have, of n that are m rows of drafts and others.

    is_draft: [>= n] bool, in batch order; None: no row is one
    columns:  [>= m, parts] of rows of drafts: the state behind each token in the entry of its number
    accepted: [>= m] of these, how many of the last forward's tokens were: the row goes on from the state of the last,
              for 0 from the first, as kernels do
    others:   [>= n - m] of the other rows, the one entry of each; None where there is none
    """

    is_draft: Tensor | None
    columns: Tensor | None
    accepted: Tensor | None
    others: Tensor | None


class Places(NamedTuple):
    """Where the states of n rows lie, of which a forward leaves so many parts at most.

    taken:   [n, 3] int64, columns as above
    first:   [n, 3] int64, the same of what always lies in the first of a row's entries
    entries, after: [n, parts] int64, behind so many tokens of a row its state is left in this entry; -1: none is
    rows:    [n, 4] int64, number, who writes, tokens before the forward, and the column of the table where it goes on
    held:    [numbers, 4] int64, by number of a row: who writes, the entry with the state of all its accepted tokens,
             the column in which its last forward went on, and 1 where the entry is that of a later column
    """

    taken: Tensor
    first: Tensor
    entries: Tensor
    after: Tensor
    rows: Tensor
    held: Tensor


def places_of(n: int, parts: int, device: torch.device) -> Places:
    """Room for forwards of n rows."""
    shapes = (n, 3), (n, 3), (n, parts), (n, parts), (n, 4), (n, 4)
    return Places(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))


class Blocks(NamedTuple):
    """How entries lie in tables.

    num_entries, null_entries: as of `States`
    size:        tokens of a block, whose number is a column; 0: a row has the same columns for all its tokens
    checkpoints: as in `take_states`; then the last part of `Places` is for these
    """

    num_entries: int
    null_entries: int
    size: int
    checkpoints: int


def choose(
    draft: Draft, rows: Rows, truth: Truth, places: Places, blocks: Blocks, *, n: int, launches: bool = True
) -> None:
    """Where n rows go on from, and what they leave. No allocation of the kernel's, no wait.

    rows: in batch order. A row whose column is another than that of its last forward goes on from what was copied
          there, unless its state lies there already, as one behind a draft may. A row of which the draft says nothing,
          or names a column that there is not, has entry -1
    """
    most = places.after.shape[1]
    if launches:
        absent = rows.starts if draft.columns is None else draft.columns
        masks = rows.starts if draft.is_draft is None else draft.is_draft.view(torch.uint8)
        others = absent if draft.others is None else draft.others
        columns, accepted = absent, absent if draft.accepted is None else draft.accepted
        drafts, rest = (0 if own is None else len(own) for own in (draft.columns, draft.others))
        _choose_kernel[(n,)](
            masks, columns, accepted, others, *rows[:4], truth.lines, *places, n, columns.shape[-1], columns.stride(0),
            others.stride(0), drafts, rest, rows.table.shape[1], rows.table.stride(0), truth.lines.stride(0), most,
            *blocks, HAS_DRAFTS=draft.is_draft is not None, BLOCK_R=triton.next_power_of_2(len(places.rows)),
            BLOCK_P=triton.next_power_of_2(most),
        )  # fmt: skip
        return
    turn = {True: 0, False: 0}
    counts = rows.lengths[:n].long(), context_lengths(rows._replace(numbers=rows.numbers[:n]))
    ends, past = (own.tolist() for own in counts)
    columns_now, columns_before = (columns_of(own, blocks.size).tolist() for own in counts)
    named: list[list[Any]] = [[] if own is None else own.tolist() for own in draft[1:]]
    drafted, kept, single = named
    places.entries[:n], places.after[:n] = -1, -1
    for row, number in enumerate(rows.numbers[:n].tolist()):
        is_draft = draft.is_draft is not None and bool(draft.is_draft[row])
        at, turn[is_draft] = turn[is_draft], turn[is_draft] + 1
        new, writer = ends[row] - past[row], int(truth.uids[number])
        if is_draft:
            own = drafted[at] if at < len(drafted) else []
            last = max(kept[at] - 1, 0) if own else 0
            entry, left = own[last] if last < len(own) else -1, own[: min(new, most - (blocks.checkpoints > 0))]
            behind = list(range(1, len(left) + 1))
        else:
            own = single[at : at + 1] or [-1]
            entry, left, behind = own[0], own, [new]
        first, column, before = own[0] if own else -1, columns_now[row], columns_before[row]
        writer_of, lies, last_column, is_later = places.held[number].tolist()
        if writer_of != writer:
            lies = int(rows.table[row, before]) if before < rows.table.shape[1] else -1
            last_column, is_later = before, 0
        is_moved = blocks.size > 0 and past[row] > 0 and last_column != column
        if blocks.checkpoints and not is_draft:
            between = int(rows.table[row, column - 1]) if 0 < column <= rows.table.shape[1] else -1
            count = max(ends[row] - 1, 0) // blocks.checkpoints * blocks.checkpoints
            is_between = count > past[row] and column - 1 > (last_column if past[row] else -1)
            if is_between and between >= blocks.null_entries:
                places.entries[row, most - 1], places.after[row, most - 1] = between, count - past[row]
        for place, (where, tokens) in enumerate(zip(left, behind, strict=True)):
            places.entries[row, place], places.after[row, place] = where, tokens
        is_there = bool(is_later) and lies == entry
        for into, where, moved in (places.taken, entry, is_moved and not is_there), (places.first, first, is_moved):
            into[row] = torch.tensor([lies if moved else where, where, moved])
        places.rows[row] = torch.tensor([number, writer, past[row], column])
    places.entries[:n].masked_fill_((places.entries[:n] < 0) | (places.entries[:n] >= blocks.num_entries), -1)


choose_torch = partial(choose, launches=False)


def note_drafted(
    taken: Taken,
    rows: Rows,
    truth: Truth,
    *,
    now: Tensor,
    entries: Tensor,
    after: Tensor,
    stored: Tensor,
    launches: bool = True,
) -> None:
    """The forward leaves states within its rows, behind tokens of which some are drafts. No allocation, no wait.

    rows, now, stored: as of `take_states`;  entries, after: as of `Places`
    """
    n, parts, most = len(rows.numbers), after.shape[1], taken.cells.shape[2]
    if launches:
        _drafted_kernel[(triton.cdiv(n * parts, BLOCK),)](
            taken.left, rows.numbers, rows.lengths, rows.starts, truth.lines, now, entries, after, stored, n * parts,
            parts, most, truth.lines.stride(0), stored.stride(0), BLOCK_N=BLOCK,
        )  # fmt: skip
        return
    live, place = live_rows(rows, now)
    known = len(live.numbers)
    past, starts, after = context_lengths(live), live.starts[:known].long(), after[:known]
    is_left = after > 0
    chains = stored[place][(starts[:, None] + after - 1).clamp(min=0)] * is_left
    left = taken.left.unflatten(1, (2, most))[:, 0, : n * parts].unflatten(1, (n, parts))
    uids = truth.uids[live.numbers.long()][:, None].expand_as(after)
    left[0] = -1
    left[:, :known] = torch.stack((torch.where(is_left, entries[:known], -1), past[:, None] + after, uids, chains))


note_drafted_torch = partial(note_drafted, launches=False)


def note_accepted(
    places: Places,
    table: Tensor,
    accepted: Tensor,
    copied: Tensor,
    *,
    n: int,
    blocks: Blocks,
    launches: bool = True,
) -> None:
    """Of n rows so many tokens were accepted. No allocation, no wait.

    Where a row has filled a block by them, the state behind its last token is copied to the entry of its column.

    table:    [>= n, width] int32 or int64, in batch order;  accepted: [>= n] int32 or int64, at least one is
    copied:   [2, >= n] int64, from which entry each row's was copied, and to which; -1: none was
    """
    parts = places.after.shape[1]
    if launches:
        _accepted_kernel[(n,)](
            places.entries, places.after, places.rows, places.held, table, accepted, copied, parts, table.shape[1],
            table.stride(0), copied.stride(0), blocks.num_entries, blocks.size, BLOCK_P=triton.next_power_of_2(parts),
        )  # fmt: skip
        return
    copied[:, :n] = torch.tensor([[0], [-1]])
    for row, (number, writer, past, column) in enumerate(places.rows[:n].tolist()):
        last = min(max(int(accepted[row]), 1), parts) - 1
        entries, after = places.entries[row].tolist(), places.after[row].tolist()
        lies, absorbed = entries[last], past + after[last]
        full = absorbed // blocks.size
        is_full = [count > 0 and past + count == full * blocks.size for count in after[: last + 1]]
        sources = list(compress(entries, is_full))
        entry = int(table[row, full - 1]) if 0 < full <= table.shape[1] else -1
        is_first = last == 0
        if sources and sources[0] >= 0 and 0 <= entry < blocks.num_entries and entry != sources[0]:
            copied[:, row] = torch.tensor([sources[0], entry])
            is_first = is_first or full - 1 == column
            lies = entry if full - 1 == column else lies
        places.held[number] = torch.tensor([writer, lies, column, not is_first])


note_accepted_torch = partial(note_accepted, launches=False)


@triton.jit(
    do_not_specialize=[
        *("n", "parts", "columns_stride", "others_stride", "num_drafts", "num_others", "table_width", "table_stride"),
        *("truth_stride", "most", "num_entries", "null_slots", "page_size", "checkpoints"),
    ],
    do_not_specialize_on_alignment=[
        *("masks", "columns", "accepted", "others", "numbers", "table", "lengths", "starts"),
    ],
)
def _choose_kernel(
    masks,
    columns,
    accepted,
    others,
    numbers,
    table,
    lengths,
    starts,
    truth,
    taken,
    first,
    entries,
    after,
    told,
    held,
    n,
    parts,
    columns_stride,
    others_stride,
    num_drafts,
    num_others,
    table_width,
    table_stride,
    truth_stride,
    most,
    num_entries,
    null_slots,
    page_size,
    checkpoints,
    HAS_DRAFTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One row."""
    i_row = tl.program_id(0).to(tl.int64)
    new = tl.load(starts + i_row + 1).to(tl.int64) - tl.load(starts + i_row).to(tl.int64)
    end = tl.load(lengths + i_row).to(tl.int64)
    past = end - new
    number = tl.load(numbers + i_row).to(tl.int64)
    uid = tl.load(truth + number * truth_stride + UID)
    o_p = tl.arange(0, BLOCK_P).to(tl.int64)
    m_p = o_p < most
    before_row, is_draft = i_row * 0, False
    if HAS_DRAFTS:
        o_r = tl.arange(0, BLOCK_R).to(tl.int64)
        b_is = tl.load(masks + o_r, mask=o_r < n, other=0).to(tl.int64)
        before_row = tl.sum(tl.where(o_r < i_row, b_is, 0))
        is_draft = tl.load(masks + i_row) != 0
    if is_draft:
        own = columns + before_row * columns_stride
        is_told = before_row < num_drafts
        last = tl.maximum(tl.load(accepted + before_row, mask=is_told, other=1).to(tl.int64) - 1, 0)
        entry = tl.load(own + last, mask=is_told & (last < parts), other=-1).to(tl.int64)
        start_entry = tl.load(own, mask=is_told, other=-1).to(tl.int64)
        drafted = most - (checkpoints > 0).to(tl.int64)
        m_left = is_told & (o_p < parts) & (o_p < new) & (o_p < drafted)
        b_entries = tl.load(own + o_p, mask=m_left, other=-1).to(tl.int64)
        b_after = tl.where(m_left, o_p + 1, -1)
    else:
        i_other = i_row - before_row
        entry = tl.load(others + i_other * others_stride, mask=i_other < num_others, other=-1).to(tl.int64)
        start_entry = entry
        b_entries, b_after = tl.where(o_p == 0, entry, -1), tl.where(o_p == 0, new, -1)
    row = table + i_row * table_stride
    size = tl.maximum(page_size, 1)
    column = tl.where(page_size > 0, tl.maximum(end - 1, 0) // size, 0)
    before = tl.where(page_size > 0, tl.maximum(past - 1, 0) // size, 0)
    lies = tl.load(row + before, mask=before < table_width, other=-1).to(tl.int64)
    is_held = tl.load(held + number * 4 + HELD_BY) == uid
    lies = tl.where(is_held, tl.load(held + number * 4 + HELD_IN), lies)
    before = tl.where(is_held, tl.load(held + number * 4 + HELD_AT), before)
    is_later = is_held & (tl.load(held + number * 4 + IS_LATER) != 0)
    is_moved = (page_size > 0) & (past > 0) & (before != column)
    is_copied = is_moved & ((lies != entry) | (not is_later))
    if (checkpoints > 0) & (not is_draft):
        is_there = (column > 0) & (column <= table_width)
        between = tl.load(row + column - 1, mask=is_there, other=-1).to(tl.int64)
        count = tl.maximum(end - 1, 0) // checkpoints * checkpoints
        is_between = (count > past) & (column - 1 > tl.where(past > 0, before, -1)) & (between >= null_slots)
        m_between = (o_p == most - 1) & is_between
        b_entries, b_after = tl.where(m_between, between, b_entries), tl.where(m_between, count - past, b_after)
    b_entries = tl.where((b_entries >= 0) & (b_entries < num_entries), b_entries, -1)
    tl.store(entries + i_row * most + o_p, b_entries, mask=m_p)
    tl.store(after + i_row * most + o_p, b_after, mask=m_p)
    tl.store(taken + i_row * 3 + SOURCE, tl.where(is_copied, lies, entry))
    tl.store(taken + i_row * 3 + ENTRY, entry)
    tl.store(taken + i_row * 3 + IS_MOVED, is_copied.to(tl.int64))
    tl.store(first + i_row * 3 + SOURCE, tl.where(is_moved, lies, start_entry))
    tl.store(first + i_row * 3 + ENTRY, start_entry)
    tl.store(first + i_row * 3 + IS_MOVED, is_moved.to(tl.int64))
    tl.store(told + i_row * 4 + NUMBER, number)
    tl.store(told + i_row * 4 + WRITER, uid)
    tl.store(told + i_row * 4 + PAST, past)
    tl.store(told + i_row * 4 + COLUMN, column)


@triton.jit(
    do_not_specialize=["n", "parts", "most", "truth_stride", "stored_stride"],
    do_not_specialize_on_alignment=["numbers", "lengths", "starts", "stored"],
)
def _drafted_kernel(
    left,
    numbers,
    lengths,
    starts,
    truth,
    now,
    entries,
    after,
    stored,
    n,
    parts,
    most,
    truth_stride,
    stored_stride,
    BLOCK_N: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    b_row = o_n // parts
    m_n = (o_n < n) & (b_row < tl.load(now + NOW_ROWS))
    b_start = tl.load(starts + b_row, mask=m_n, other=0).to(tl.int64)
    b_new = tl.load(starts + b_row + 1, mask=m_n, other=0).to(tl.int64) - b_start
    b_past = tl.load(lengths + b_row, mask=m_n, other=0).to(tl.int64) - b_new
    b_after = tl.load(after + o_n, mask=m_n, other=-1)
    m_left = m_n & (b_after > 0)
    b_number = tl.load(numbers + b_row, mask=m_n, other=0).to(tl.int64)
    at = stored + tl.load(now + NOW_PLACE) * stored_stride + b_start + b_after - 1
    tl.store(left + o_n, tl.load(entries + o_n, mask=m_left, other=-1), mask=o_n < n)
    tl.store(left + 2 * most + o_n, b_past + b_after, mask=m_n)
    tl.store(left + 4 * most + o_n, tl.load(truth + b_number * truth_stride + UID, mask=m_n, other=0), mask=m_n)
    tl.store(left + 6 * most + o_n, tl.load(at, mask=m_left, other=0), mask=m_n)


@triton.jit(
    do_not_specialize=["parts", "table_width", "table_stride", "copied_stride", "num_entries", "page_size"],
    do_not_specialize_on_alignment=["table", "accepted"],
)
def _accepted_kernel(
    entries,
    after,
    told,
    held,
    table,
    accepted,
    copied,
    parts,
    table_width,
    table_stride,
    copied_stride,
    num_entries,
    page_size,
    BLOCK_P: tl.constexpr,
):
    """One row."""
    i_row = tl.program_id(0).to(tl.int64)
    number, uid = tl.load(told + i_row * 4 + NUMBER), tl.load(told + i_row * 4 + WRITER)
    past, column = tl.load(told + i_row * 4 + PAST), tl.load(told + i_row * 4 + COLUMN)
    last = tl.minimum(tl.maximum(tl.load(accepted + i_row).to(tl.int64), 1), parts) - 1
    o_p = tl.arange(0, BLOCK_P).to(tl.int64)
    b_entries = tl.load(entries + i_row * parts + o_p, mask=o_p < parts, other=-1)
    b_after = tl.load(after + i_row * parts + o_p, mask=o_p < parts, other=-1)
    lies = tl.sum(tl.where(o_p == last, b_entries, 0))
    absorbed = past + tl.sum(tl.where(o_p == last, b_after, 0))
    full = absorbed // page_size
    m_source = (o_p <= last) & (b_after > 0) & (past + b_after == full * page_size)
    is_source = tl.sum(m_source.to(tl.int64)) > 0
    source = tl.sum(tl.where(m_source, b_entries, 0))
    is_there = (full > 0) & (full <= table_width)
    entry = tl.load(table + i_row * table_stride + full - 1, mask=is_there, other=-1).to(tl.int64)
    is_copied = is_source & (source >= 0) & (entry >= 0) & (entry < num_entries) & (entry != source)
    tl.store(copied + i_row, tl.where(is_copied, source, 0))
    tl.store(copied + copied_stride + i_row, tl.where(is_copied, entry, -1))
    is_own = is_copied & (full - 1 == column)
    tl.store(held + number * 4 + HELD_BY, uid)
    tl.store(held + number * 4 + HELD_IN, tl.where(is_own, entry, lies))
    tl.store(held + number * 4 + HELD_AT, column)
    tl.store(held + number * 4 + IS_LATER, ((last > 0) & (not is_own)).to(tl.int64))
