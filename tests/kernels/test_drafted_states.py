"""Where states of drafts lie: kernels and references give equal bits, over poisoned room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.watch.drafted_states import (
    Blocks,
    Draft,
    Places,
    choose,
    choose_torch,
    note_accepted,
    note_accepted_torch,
    note_drafted,
    note_drafted_torch,
    places_of,
)
from kvcanary_kernels.watch.states import taken_of
from kvcanary_kernels.watch.walk import TAILS, UID, Rows, Truth
from tests.kernels.test_state_rows import ENTRIES, POISON, RING, VERIFY, Drawn, equal

SIZES = [(1, 2), (5, 3), (70, 4)]
SIZE, WIDTH, NULLS = 4, 9, 1  # tokens of a block, columns of a table, entries that are nobody's


class Batch:
    """Rows of which some draft, by a seed; `size` as of `Blocks`."""

    def __init__(self, device: str, rows: int, parts: int, which: str, size: int, checkpoints: int = 0) -> None:
        drawn = self.drawn = Drawn(rows + parts, device)
        self.n, self.parts = rows, parts
        self.blocks = Blocks(ENTRIES, NULLS, size, checkpoints)
        self.masks = {"none": drawn(0, 1, rows), "all": drawn(1, 2, rows), "some": drawn(0, 2, rows)}[which].bool()
        self.table = drawn(-1, ENTRIES + 1, rows, WIDTH).to(torch.int32)
        self.past, prompts = drawn(0, SIZE * 4, rows), drawn(1, SIZE * 2, rows)
        self.new = torch.where(self.masks, drawn(1, parts + 1, rows), prompts)
        self.ends = self.past + self.new
        numbers = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(1))[:rows].to(device)
        starts = torch.cat((self.new.new_zeros(1), self.new.cumsum(0))).to(torch.int32)
        self.rows = Rows(numbers, self.table, self.ends.to(torch.int32), starts)
        self.truth = Truth(drawn(1, 9, rows + 3, TAILS + 1))
        first = (self.ends - 1) // size if size else torch.zeros_like(self.ends)
        columns = self.table.long().gather(1, first[:, None] + torch.arange(parts, device=device)).to(torch.int32)
        self.columns, self.accepted = columns, drawn(1, parts + 1, rows)
        self.draft = Draft(
            None if which == "none" else self.masks,
            None if which == "none" else columns[self.masks],
            None if which == "none" else self.accepted[self.masks].to(torch.int32),
            None if which == "all" else columns[:, 0][~self.masks],
        )

    def places(self) -> Places:
        """Poisoned, but for what half of the rows held."""
        most = self.parts + (self.blocks.checkpoints > 0)
        places = places_of(self.n + 3, most, self.table.device)
        for told in places[:-1]:
            told.fill_(POISON)
        held = Drawn(5, str(self.table.device))
        places.held[:, 0] = torch.where(held(0, 2, self.n + 3) > 0, self.truth.lines[:, UID.value], 0)
        places.held[:, 1], places.held[:, 2] = held(0, ENTRIES, self.n + 3), held(0, 5, self.n + 3)
        places.held[:, 3] = held(0, 2, self.n + 3)
        own = self.columns[:, -1].long()  # the state of some lies there already
        places.held[self.rows.numbers, 1] = torch.where(held(0, 3, self.n) == 0, own, places.held[self.rows.numbers, 1])
        return places

    def chosen(self, operation: Any) -> Places:
        places = self.places()
        operation(self.draft, self.rows, self.truth, places, self.blocks, n=self.n)
        assert all((told[self.n :] == POISON).all() for told in places[:-1])
        return places


@pytest.mark.parametrize("which", ["none", "all", "some"])
@pytest.mark.parametrize(("rows", "parts"), SIZES)
@pytest.mark.parametrize(("size", "checkpoints"), [(0, 0), (SIZE, 0), (SIZE, 2 * SIZE)])
def test_rows_of_drafts_have_their_columns(
    device: str, rows: int, parts: int, which: str, size: int, checkpoints: int
) -> None:
    """They go on from that of the last accepted token, and leave a state behind each token; others have one entry."""
    batch = Batch(device, rows, parts, which, size, checkpoints)
    places = batch.chosen(choose_torch)
    assert equal(list(batch.chosen(choose)), list(places))
    for row in range(rows):
        own, new, is_draft = batch.columns[row].tolist(), int(batch.new[row]), bool(batch.masks[row])
        assert places.taken[row, 1] == own[int(batch.accepted[row]) - 1 if is_draft else 0]
        assert places.first[row, 1] == own[0]
        behind = range(1, min(new, parts) + 1) if is_draft else [new]
        left = dict(zip(behind, (own if 0 <= own < ENTRIES else -1 for own in own), strict=False))
        noted = zip(places.after[row, :parts].tolist(), places.entries[row, :parts].tolist(), strict=True)
        assert {after: entry for after, entry in noted if after > 0} == left


@pytest.mark.parametrize("size", [0, SIZE])
@pytest.mark.parametrize(("rows", "parts"), SIZES)
def test_what_a_draft_does_not_say_is_not_read(device: str, rows: int, parts: int, size: int) -> None:
    """Counts beyond the columns, and lists that end before their rows do: entry -1; nothing behind a list is read."""
    batch = Batch(device, rows, parts, "some", size)
    columns, others = batch.columns[batch.masks], batch.columns[:, 0][~batch.masks]
    accepted = batch.drawn(0, parts + 3, len(columns)).to(torch.int32)
    batch.draft = Draft(batch.masks, columns[: len(columns) // 2], accepted, others[: len(others) // 2])
    places = batch.chosen(choose_torch)
    assert equal(list(batch.chosen(choose)), list(places))
    turn = {True: 0, False: 0}
    for row, is_draft in enumerate(batch.masks.tolist()):
        at, turn[is_draft] = turn[is_draft], turn[is_draft] + 1
        told, entry = (columns, None) if is_draft else (others, None)
        if at < len(told) // 2:
            last = max(int(accepted[at]) - 1, 0) if is_draft else 0
            entry = int(told[at].view(-1)[last]) if last < told[at].numel() else None
        assert places.taken[row, 1] == (-1 if entry is None else entry)


@pytest.mark.parametrize(("rows", "parts"), SIZES)
def test_rows_go_on_from_what_was_copied_to_their_next_column(device: str, rows: int, parts: int) -> None:
    """From where the last forward's states lie, and one that begins with a prefix from the column of that."""
    batch = Batch(device, rows, parts, "some", SIZE)
    places, before = batch.chosen(choose), batch.places()
    for row, number in enumerate(batch.rows.numbers.tolist()):
        past, column = int(batch.past[row]), (int(batch.ends[row]) - 1) // SIZE
        writer, lies, last, is_later = before.held[number].tolist()
        if writer != int(batch.truth.uids[number]):
            last, is_later = max(past - 1, 0) // SIZE, 0
            lies = int(batch.table[row, last])
        is_moved = past > 0 and last != column
        is_there = is_later and lies == places.taken[row, 1]
        for told, moved in (places.taken[row], is_moved and not is_there), (places.first[row], is_moved):
            assert told[2] == moved
            assert told[0] == (lies if moved else told[1])


@pytest.mark.parametrize("which", ["none", "all", "some"])
@pytest.mark.parametrize(("rows", "parts"), SIZES)
def test_states_of_accepted_tokens_are_held(device: str, rows: int, parts: int, which: str) -> None:
    """In the entry of the last one; where a block is full, what lies behind its last token is copied to that."""
    batch = Batch(device, rows, parts, which, SIZE)

    def run(operation: Any) -> list[Tensor]:
        places, copied = batch.chosen(choose), batch.drawn(POISON, POISON + 1, 2, rows + 2)
        operation(places, batch.table, batch.accepted.to(torch.int32), copied, n=rows, blocks=batch.blocks)
        return [places.held, copied]

    held, copied = run(note_accepted_torch)
    assert equal(run(note_accepted), [held, copied])
    assert (copied[:, rows:] == POISON).all()
    places, is_copied = batch.chosen(choose), 0
    for row, number in enumerate(batch.rows.numbers.tolist()):
        past, last = int(batch.past[row]), int(batch.accepted[row]) - 1
        noted = zip(places.after[row].tolist(), places.entries[row].tolist(), strict=True)
        states = {past + after: entry for after, entry in noted if after > 0}
        absorbed = past + int(places.after[row, last])
        full = absorbed // SIZE * SIZE
        into, source = int(batch.table[row, full // SIZE - 1]) if full else -1, states.get(full, -1)
        is_due = source >= 0 and 0 <= into < ENTRIES and source != into and full <= absorbed and full > past
        assert copied[:, row].tolist() == ([source, into] if is_due else [0, -1])
        column = (int(batch.ends[row]) - 1) // SIZE
        is_own = is_due and full // SIZE - 1 == column
        lies = into if is_own else int(places.entries[row, last])
        assert held[number].tolist() == [int(batch.truth.uids[number]), lies, column, last > 0 and not is_own]
        is_copied += is_due
    assert is_copied or rows < 70 or which == "none"


@pytest.mark.parametrize(("rows", "parts"), [(1, 2), (5, 3), (70, 4)])
def test_what_drafts_leave_is_noted(device: str, rows: int, parts: int) -> None:
    """Behind each of its tokens a row leaves a state with the chain that the forward stores there; padding none."""

    def run(operation) -> list[Tensor]:
        drawn, lines = Drawn(rows + parts, device), rows + 3
        taken, live = taken_of(drawn.states("rolling"), 1, lines * parts), int(drawn(0, rows + 1, 1))
        taken.left.fill_(POISON)
        new, past = drawn(1, parts + 1, lines), drawn(0, 9, lines)
        starts = torch.cat((new.new_zeros(1), new.cumsum(0))).to(torch.int32)
        numbers = torch.randperm(lines, generator=torch.Generator().manual_seed(1)).to(device)
        places = torch.arange(1, parts + 1, device=device).expand(lines, -1)
        told = {"entries": drawn(0, ENTRIES, lines, parts), "after": torch.where(places <= new[:, None], places, -1)}
        told["now"] = torch.tensor([live, 0, 5, VERIFY, 5, 0], device=device)
        told["stored"], truth = drawn(0, 999, RING, int(starts[-1])), Truth(drawn(0, 99, lines, TAILS + 1))
        table = drawn(0, ENTRIES, lines, parts).to(torch.int32)
        own = Rows(numbers, table, (past + new).to(torch.int32), starts)
        operation(taken, own, truth, **told)
        noted = taken.left.unflatten(1, (2, -1))[:, 0].unflatten(1, (lines, parts))
        last = new[:live, None] - 1
        assert (noted[1, :live].gather(1, last)[:, 0] == (past + new)[:live]).all()
        assert (noted[3, :live].gather(1, last)[:, 0] == told["stored"][5][starts[1 : live + 1].long() - 1]).all()
        assert (noted[0, live:] == -1).all()
        return [taken.left]

    assert equal(run(note_drafted), run(note_drafted_torch))
