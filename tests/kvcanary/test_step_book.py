"""StepBook: compiled loops over the structs of requests give what a plain model of them gives."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcanary.ledger.ledger import Ledger, Role
from kvcanary.ledger.request_state import UncollectedStep
from kvcanary.ledger.requests import Batch
from kvcanary.ledger.step_book import in_a_row
from kvcanary.native.layout import LEFT_TO_LEDGER, NO_ROOM, NOT_WRITTEN, NOWHERE, OTHER, PAGES_FINAL, ROWS, RUN, UNKNOWN
from kvcanary.native.request_lengths import accept_rows, launch_rows
from kvcanary_kernels.record.layout import make_keys

NAMES, PAGE_SIZE, AHEAD, OFFSET, PLACES = ["a", "b", "c"], 4, (0, 1), (0, 1), 3


def accept(batch: Batch, accepted: NDArray[np.int64] | None, step: int) -> int:
    """What a captured step has accepted, [requests, 1 + places]; None: it has not run."""
    reported = *batch.loop_arguments, 0 if accepted is None else accepted.ctypes.data, 1 + PLACES, step
    if (found := accept_rows(*reported)) == NO_ROOM and accepted is not None:
        batch.make_room([PLACES] * len(batch))
        found = accept_rows(*reported)
    return int(found)


@dataclass
class Row:
    """A request, as plain Python has it."""

    tokens: list[int]
    growth: list[int]  # by token the step
    row_lens: list[int] = field(default_factory=lambda: [0, 0])
    reads: list[list[tuple[int, int, int]]] = field(default_factory=lambda: [[], []])
    uncollected: list[UncollectedStep] = field(default_factory=list)
    committed_len: int = 0
    commit_step: int = 0
    in_flight: int = 0
    pending_acceptances: int = 0

    def final_len(self, pool: int, committed_len: int | None = None) -> int:
        length = self.committed_len if committed_len is None else committed_len
        return min(length + AHEAD[pool], self.row_lens[pool])

    def append(self, tokens: list[int], step: int) -> None:
        self.tokens += tokens
        self.growth += [step] * len(tokens)

    def commit(self, length: int, step: int) -> bool:
        """Whether all of it was written."""
        is_written = self.row_lens[0] >= length
        for pool in range(2):
            known = max((end for _, end, _ in self.reads[pool]), default=0)
            if self.final_len(pool) > known:
                self.reads[pool].append((known, self.final_len(pool), self.commit_step))
            self.row_lens[pool] = min(self.row_lens[pool], length + AHEAD[pool])
        self.committed_len, self.commit_step = length, step
        return is_written

    def has_final_page(self, committed_len: int) -> bool:
        return min(self.final_len(pool, committed_len) for pool in range(2)) >= PAGE_SIZE  # none is final yet


class ManagerState:
    """A ledger, and its model."""

    def __init__(self, seed: int) -> None:
        self.random, self.step = random.Random(seed), 1
        roles = [Role("target"), Role("draft", OFFSET[1], AHEAD[1])]
        self.ledger = Ledger(6, PAGE_SIZE, 1, make_keys(seed, 1, 2), roles)
        self.rows = {}
        for name in NAMES:
            tokens = [self.random.randrange(97) for _ in range(self.random.randrange(9))]
            self.ledger.admit(name, tokens, 0)
            self.ledger.grant(name, [1 + len(self.rows)], 0)  # which nobody writes: the rules are to say that
            self.rows[name] = Row(list(tokens), [0] * len(tokens))

    def some(self) -> list[str]:
        return self.random.sample(NAMES, self.random.randrange(1, len(NAMES) + 1))

    def write(self) -> None:
        names, kind, pool = self.some(), self.random.choice(["verify", "draft", "extend"]), self.random.randrange(2)
        before = [self.random.randrange(30) for _ in names] if self.random.random() < 0.5 else None
        written = [self.random.randrange(9) for _ in names]
        given = None if before is None else array("q", before)
        self.ledger.steps.write_rows(self.ledger.batches[tuple(names)], kind, pool, given, array("q", written))
        for number, name in enumerate(names):
            row = self.rows[name]
            length = (row.final_len(pool) if before is None else before[number]) + written[number]
            most = row.committed_len + AHEAD[pool] if kind == "extend" else length
            row.row_lens[pool] = row.row_lens[pool] if kind == "draft" else min(length, most)

    def launch(self) -> None:
        names, pool, forwards = self.some(), self.random.randrange(2), self.random.randrange(1, 4)
        written = None if self.random.random() < 0.4 else [self.random.randrange(4) for _ in names]
        reported, numbers = array("q", written or ()), array("q", bytes(8 * (ROWS.size * len(names) + 1)))
        at = 0 if written is None else reported.buffer_info()[0]
        launch_rows(
            *self.ledger.batches[tuple(names)].loop_arguments, pool, 1, forwards, OTHER, at, numbers.buffer_info()[0]
        )
        committed, collected = numbers[ROWS.committed * len(names) : -1], numbers[-1]
        rows = [self.rows[name] for name in names]
        is_behind = written is None or any(row.uncollected or row.pending_acceptances for row in rows)
        lens = [row.uncollected[0].before if row.uncollected else row.committed_len for row in rows]
        assert (committed.tolist(), collected) == (
            [row.committed_len for row in rows],
            sum(lens) if is_behind else UNKNOWN,
        )
        for number, row in enumerate(rows):
            row.in_flight += forwards
            row.pending_acceptances += written is None
            if not is_behind and written is not None:
                row.row_lens[pool] = row.final_len(pool) + written[number]

    def accept(self) -> None:
        names = [name for name in self.some() if self.rows[name].pending_acceptances]
        has_run = self.random.random() < 0.8
        accepted = np.array([[self.random.randrange(97) for _ in range(1 + PLACES)] for _ in names], np.int64)
        accepted = accepted.reshape(-1, 1 + PLACES)
        counts = [*range(-1, PLACES + 1), PLACES + 1, 1 << 40]  # a device may say anything
        accepted[:, 0] = [self.random.choice(counts) for _ in names]
        found = accept(self.ledger.batches[tuple(names)], accepted if has_run else None, self.step)
        is_written = True
        for name, (count, *tokens) in zip(names, accepted.tolist(), strict=True):
            row = self.rows[name]
            row.pending_acceptances -= 1
            count = min(count, PLACES)
            if has_run and count > 0:
                row.append(tokens[:count], self.step)
                row.uncollected.append(UncollectedStep(tokens[:count], row.committed_len, row.committed_len + count))
                is_written &= row.commit(row.committed_len + count, self.step)
        assert found == (0 if is_written else NOT_WRITTEN)

    def append(self) -> None:
        names = self.some()
        token_ids = [[self.random.randrange(97) for _ in range(self.random.randrange(4))] for _ in names]
        for number, name in enumerate(names):
            row = self.rows[name]
            if not row.uncollected:
                row.append(token_ids[number], self.step)
            elif self.random.random() < 0.9:
                token_ids[number] = row.uncollected[0].tokens
            else:
                first = len(row.tokens) - sum(len(one.tokens) for one in row.uncollected)
                end = first + len(row.uncollected[0].tokens)
                row.tokens[first:end] = token_ids[number]
                row.growth[first:end] = [row.growth[first]] * len(token_ids[number])
                row.uncollected[0] = row.uncollected[0]._replace(tokens=token_ids[number])
        self.ledger.steps.append(self.ledger.batches[tuple(names)], *in_a_row(token_ids), self.step)

    def commit(self) -> None:
        names = self.some()
        rows, lens = [self.rows[name] for name in names], []
        for row in rows:
            reported = (
                row.uncollected[0].committed_len if row.uncollected else row.committed_len + self.random.randrange(3)
            )
            lens.append(max(reported - (self.random.random() < 0.1), 0))
        odd = [
            length != row.uncollected[0].committed_len if row.uncollected else length < row.committed_len
            for row, length in zip(rows, lens, strict=True)
        ]
        reported = self.ledger.batches[tuple(names)], array("q", lens), self.step
        found = self.ledger.steps.commit_rows(*reported, is_judged=False)
        if any(odd):
            assert found == LEFT_TO_LEDGER
            self.expect_same()
            found = self.ledger.steps.commit_rows(*reported, is_judged=True)
        wanted = 0
        for row, length in zip(rows, lens, strict=True):
            if row.uncollected:
                row.uncollected.pop(0)
                continue
            wanted |= 0 if row.commit(length, self.step) else NOT_WRITTEN
            wanted |= 0 if row.in_flight or not row.has_final_page(length) else PAGES_FINAL
        assert found == wanted

    def land(self) -> None:
        names = [name for name in self.some() if self.rows[name].in_flight]
        batch, n = self.ledger.batches[tuple(names)], len(names)
        committed = [self.random.randrange(self.rows[name].committed_len + 1) for name in names]
        rows = array("q", [0] * ROWS.committed * n + [*committed, UNKNOWN])
        structs = array("q", bytes(8 * RUN.size))
        structs[RUN.requests], structs[RUN.structs] = batch.loop_arguments
        structs[RUN.rows] = rows.buffer_info()[0]
        which, place = [], 0
        while (place := self.ledger.steps.finalise_runs(structs, place)) != NOWHERE:
            which.append(place)
            place += 1
        wanted = []
        for number, name in enumerate(names):
            row = self.rows[name]
            row.in_flight -= 1
            if row.has_final_page(committed[number] if row.in_flight else row.committed_len):
                wanted.append(number)
        assert which == wanted

    def expect_same(self) -> None:
        for name, row in self.rows.items():
            request = self.ledger.request(name)
            assert request.tokens.tolist() == row.tokens
            assert request.steps.tolist() == row.growth
            assert request.row_lens.tolist() == row.row_lens
            assert request.uncollected == row.uncollected
            numbers = request.committed_len, request.commit_step, request.in_flight, request.pending_acceptances
            assert numbers == (row.committed_len, row.commit_step, row.in_flight, row.pending_acceptances)


@pytest.mark.parametrize("seed", range(6))
def test_what_steps_change_is_what_a_plain_model_says(seed):
    """Tokens, lengths, looks, steps that the engine has not declared and forwards in flight, after every call."""
    manager_state = ManagerState(seed)
    for _ in range(250):
        manager_state.random.choice(
            [
                manager_state.write,
                manager_state.launch,
                manager_state.accept,
                manager_state.append,
                manager_state.commit,
                manager_state.land,
            ]
        )()
        manager_state.step += manager_state.random.randrange(2)
        manager_state.expect_same()
    for name, row in manager_state.rows.items():
        request = manager_state.ledger.request(name)
        assert [list(queue.oldest_first()) for queue in request.reads] == row.reads
        assert [queue.length for queue in request.reads] == [
            max((end for _, end, _ in own), default=0) for own in row.reads
        ]


def test_the_books_of_a_request_that_is_over_do_not_go_on():
    """What a step has accepted for it is nobody's, and a batch of its name is that of the next one."""
    ledger = Ledger(6, PAGE_SIZE, 1, make_keys(1, 1, 2), [Role("target")])
    request = ledger.admit("a", [1, 2], 0)
    batch = ledger.batches[("a",)]
    request.pending_acceptances = 1
    ledger.forget("a")
    assert accept(batch, np.array([[1, 9, 0, 0]], np.int64), 3) == 0
    assert (request.pending_acceptances, request.tokens.tolist(), request.committed_len) == (0, [1, 2], 0)
    again = ledger.admit("a", [1, 2], 4)
    assert ledger.batches[("a",)].requests == [again]
