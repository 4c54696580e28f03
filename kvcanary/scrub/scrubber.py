"""Scrubber: the rolling check of committed bytes under a budget, and the last re-read when a request ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import filterfalse, repeat
from operator import attrgetter

import numpy as np
import torch

from kvcanary.calls.entries import Entries, named
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.checks.content import find_changed
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.requests import Batch
from kvcanary.native.layout import ALL, ITS_SHARE, NO_ROOM, SLICE, TAKEN
from kvcanary.pools.slot_maps import Ints, slots_in, window_start
from kvcanary.records.fingerprints import slots_are_right
from kvcanary.records.mailbox import to_device
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.rereads import Rereads

#: The automatic budget reads every so many steps, as many times more: the same rotation for fewer operations. It is
#: odd: a row that grows by a token a step is met at another place of each page.
STRIDE = 15
_is_over = attrgetter("released")


class Scrubber:
    """Plans on the host which committed slots are read again, oldest re-read first.

    stride:  steps from slice to slice; with a budget of the user's every step has one
    hurried: requests of which the next slice reads all
    """

    def __init__(self, state: CanaryState, ledger: Ledger, budget: int | None, rereads: Rereads) -> None:
        self.stride = STRIDE if budget is None else 1
        self._state, self._ledger, self._budget, self._rereads = state, ledger, budget, rereads
        self.credit: dict[tuple[int, int], float] = {}
        self.hurried: set[str] = set()
        self._attended: dict[tuple[int, int], int] = {}
        self._batch = Batch([])
        self._slots, self._ranges = np.empty(0, np.int64), np.empty((0, TAKEN.size), np.int64)
        self._said = array("q", bytes(8 * SLICE.size))
        self.bytes_read = self.longest_wait = 0

    def reread_soon(self, request_ids: Iterable[str]) -> None:
        """Something was found near these requests' bytes: the next slice reads all of them."""
        self.hurried.update(request_ids)

    def attend(self, pool: PoolState, requests: Iterable[Request], step: int) -> None:
        """Attention reads and compares all bytes of these rows in this step: its slice leaves them out."""
        self._attended.update(((request.uid, pool.pool_id), step) for request in requests)

    def slice(self, step: int, batch: Batch) -> list[Violation | ViolationBatch]:
        """This step's share: within the rotation every committed byte of every running request is read again.

        batch: the running requests. What fires at once; on a GPU the host collects it with the step.
        """
        requests = batch.requests
        violations: list[Violation | ViolationBatch] = []
        total = self._bytes_of(requests) if self._budget is not None else 0
        is_even = self._budget is None and not self.hurried and not self._attended
        for pool in self._state.pools if requests else ():
            counts = None if is_even else array("q", [self._count(own, pool, step, total) for own in requests])
            slots, taken = self._take(pool, batch, counts, step)
            if len(slots):
                entries = partial(_entries_of, pool, requests, taken.copy())
                judge = partial(
                    find_changed, pool, entries_of=entries, site=("sweep", 0), step=step, both_fingerprints=False
                )
                violations += self._rereads.reread(pool, slots, judge)
        self.hurried.clear()
        return violations

    def reread_all(self, request: Request, step: int) -> list[ViolationBatch]:
        """All committed bytes of a request, in every pool, with both fingerprints."""
        violations: list[ViolationBatch] = []
        for pool in self._state.pools:
            slots, taken = self._take(pool, Batch([request]), array("q", [ALL]), step, again=True)
            self.credit.pop((request.uid, pool.pool_id), None)
            self._attended.pop((request.uid, pool.pool_id), None)
            where = to_device(torch.from_numpy(slots), self._state.records.device)
            if len(slots) and not slots_are_right(pool, where, both_fingerprints=True):
                entries = partial(_entries_of, pool, [request], taken)
                violations += find_changed(pool, slots, entries, ("release", 0), step, both_fingerprints=True)
        return violations

    def mark_read(self, pool: PoolState, request: Request, step: int) -> int:
        """All committed bytes of this request were read by another check in this step; how many."""
        length = self.commit(request, pool)
        for _, _, read in request.reads[pool.pool_id].take(length, step):
            self.longest_wait = max(self.longest_wait, step - read)
        return length * pool.view.slot_bytes

    def commit(self, request: Request, pool: PoolState) -> int:
        """Let newly committed positions join the queue; its length."""
        queue = request.reads[pool.pool_id]
        queue.extend_to(request.final_len(pool.pool_id), request.commit_step)
        return queue.length

    def waiting(self, step: int) -> int:
        """Steps since the last re-read at the live byte that waits longest."""
        oldest = [
            read
            for request in self._ledger.requests.values()
            if not request.released
            for queue in request.reads
            if (read := queue.oldest()) is not None
        ]
        return max((step - read for read in oldest), default=0)

    def _count(self, request: Request, pool: PoolState, step: int, total: int) -> int:
        """Slots of this request and pool to read now: all, its share, or what a budget of bytes has come to."""
        key = request.uid, pool.pool_id
        if self._attended.get(key) == step:
            return 0
        if request.request_id in self.hurried:
            return ALL
        if self._budget is None:
            return ITS_SHARE
        length = self.commit(request, pool)
        if not length:
            return 0
        credit = min(self.credit.get(key, 0.0) + length * self._budget / total, float(length))
        self.credit[key] = credit - int(credit)
        return int(credit)

    def batch(self) -> Batch:
        """The running requests: the same from slice to slice, as long as they are."""
        requests = [*filterfalse(_is_over, self._ledger.requests.values())]
        if self._batch.requests != requests:
            self._batch = Batch(requests)
        return self._batch

    def live_bytes(self) -> int:
        """Committed bytes of all running requests."""
        return self._bytes_of(self.batch().requests)

    def _bytes_of(self, requests: Iterable[Request]) -> int:
        return sum(
            (end - window_start(pool.view, end)) * pool.view.slot_bytes
            for request in requests
            for pool in self._state.pools
            if (end := request.final_len(pool.pool_id))
        )

    def _take(
        self, pool: PoolState, batch: Batch, counts: array[int] | None, step: int, again: bool = False
    ) -> tuple[Ints, Ints]:
        """Slots of the pool to read, oldest re-read first, and ranges [ranges, TAKEN.size] of positions behind them.

        Both lie where the next slice does. counts: slots to read now, by request; None: of all their share
        again: also what was read in this very step
        """
        at, said = 0 if counts is None else counts.buffer_info()[0], self._said
        when = self.stride, step + again, step
        arguments = *batch.loop_arguments, pool.struct_at, at, *when, pool.view.slot_map is not None
        while found := pool.loops.take_slice(*arguments, self._slots, self._ranges, said.buffer_info()[0]):
            if found == NO_ROOM:
                batch.make_room(repeat(0, len(batch)))
            else:
                self._slots = np.empty(max(2 * said[SLICE.slots], len(self._slots)), np.int64)
                self._ranges = np.empty((max(2 * said[SLICE.ranges], len(self._ranges)), TAKEN.size), np.int64)
        self.longest_wait = max(self.longest_wait, said[SLICE.wait])
        slots, taken = self._slots[: said[SLICE.slots]], self._ranges[: said[SLICE.ranges]]
        if pool.view.slot_map is not None:
            slots = slots_in(pool.view, slots)
            slots = slots[slots >= pool.view.null_slots]
        self.bytes_read += len(slots) * pool.view.slot_bytes
        return slots, taken


def _entries_of(pool: PoolState, requests: Sequence[Request], taken: Ints) -> Entries:
    """What is known of every slot that is read; freed ones are none, nor those that a slot map sends nowhere."""
    columns = []
    for row, start, end, read in taken.tolist():
        slots = np.frombuffer(requests[row].row, np.int64)[start:end]
        n = len(slots)
        columns.append((slots, np.arange(start, start + n), np.full(n, row), np.full(n, read)))
    names, positions, rows, last_good = map(np.concatenate, zip(*columns, strict=True))
    slots = slots_in(pool.view, names)
    held = slots >= pool.view.null_slots
    ids = [request.request_id for request in requests]
    return Entries(slots[held], positions[held], rows[held], ids, last_good[held], named(pool, names[held]))
