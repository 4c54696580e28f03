"""Sweep: the rolling check of committed bytes under a budget, and the last look when a request ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kvcanary.config import share_of
from kvcanary.content import find_changed
from kvcanary.entries import Entries, named
from kvcanary.groups import Ints, slots_in, window_start
from kvcanary.hits import Hit
from kvcanary.intake import HitBatch
from kvcanary.lanes import slots_are_right
from kvcanary.ledger import Ledger, Request
from kvcanary.looks import Looks
from kvcanary.outbox import to_device
from kvcanary.queues import spans
from kvcanary.state import CanaryState, PoolState


@dataclass(slots=True)
class Look:
    """Positions of one request in one pool whose bytes are looked at now."""

    request: Request
    ranges: list[tuple[int, int, int]] = field(default_factory=list)  # (start, end, last known good)


#: The automatic budget reads every so many steps, as many times more: the same rotation for fewer operations.
STRIDE = 8


class Sweeper:
    """Plans on the host which committed slots are read again, oldest look first."""

    def __init__(self, state: CanaryState, ledger: Ledger, budget: int | None, looks: Looks) -> None:
        self._state, self._ledger, self._budget, self._looks = state, ledger, budget, looks
        self.credit: dict[tuple[int, int], float] = {}
        self.hurried: set[str] = set()
        self._attended: dict[tuple[int, int], int] = {}
        self.bytes_read = 0
        self.longest_wait = 0

    @property
    def stride(self) -> int:
        """Steps from slice to slice."""
        return 1 if self._budget is not None else STRIDE

    def is_due(self, step: int) -> bool:
        """Whether this step has a slice: all have with a budget of the user's, and those after a finding."""
        return step % self.stride == 0 or bool(self.hurried)

    def look_around(self, request_ids: Iterable[str]) -> None:
        """Something was found near these requests' bytes: the next slice reads all of them."""
        self.hurried.update(request_ids)

    def attend(self, pool: PoolState, requests: Iterable[Request], step: int) -> None:
        """Attention reads and compares all bytes of these rows in this step: its slice leaves them out."""
        self._attended.update(((request.uid, pool.pool_id), step) for request in requests)

    def slice(self, step: int) -> list[Hit | HitBatch]:
        """This step's share: within the rotation every committed byte of every running request is read again.

        What fires at once; on a GPU the host hears of it with the step.
        """
        requests = self.running()
        total = self._bytes_of(requests) if self._budget is not None else 0
        hits: list[Hit | HitBatch] = []
        for pool in self._state.pools:
            looks = []
            for request in requests:
                if self._attended.get((request.uid, pool.pool_id)) == step:
                    continue
                queue = self.commit(request, pool)
                hurried = request.request_id in self.hurried
                count = queue if hurried else self._share(request, pool, queue, total)
                if count:
                    looks.append(Look(request, request.reads[pool.pool_id].take(count, step)))
            hits += self._look_later(pool, looks, step)
        self.hurried.clear()
        return hits

    def last_look(self, request: Request, step: int) -> list[HitBatch]:
        """All committed bytes of a request, in every pool, with both lanes."""
        hits: list[HitBatch] = []
        for pool in self._state.pools:
            length = self.commit(request, pool)
            queue = request.reads[pool.pool_id]
            look = Look(request, queue.take(length, step, again=True))
            self.credit.pop((request.uid, pool.pool_id), None)
            self._attended.pop((request.uid, pool.pool_id), None)
            hits += self._look(pool, [look], ("release", 0), step, both_lanes=True)
        return hits

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
        """Steps since the last look at the live byte that waits longest."""
        oldest = [
            read
            for request in self._ledger.requests.values()
            if not request.released
            for queue in request.reads
            if (read := queue.oldest()) is not None
        ]
        return max((step - read for read in oldest), default=0)

    def _share(self, request: Request, pool: PoolState, length: int, total: int) -> int:
        """Slots of this request and pool to read now."""
        if self._budget is None:
            return share_of(length, STRIDE)
        if not length:
            return 0
        key = request.uid, pool.pool_id
        credit = min(self.credit.get(key, 0.0) + length * self._budget / total, float(length))
        self.credit[key] = credit - int(credit)
        return int(credit)

    def running(self) -> list[Request]:
        """The requests that have not ended."""
        return [request for request in self._ledger.requests.values() if not request.released]

    def live_bytes(self) -> int:
        """Committed bytes of all running requests."""
        return self._bytes_of(self.running())

    def _bytes_of(self, requests: Iterable[Request]) -> int:
        return sum(
            (end - window_start(pool.view, end)) * pool.view.slot_bytes
            for request in requests
            for pool in self._state.pools
            if (end := request.final_len(pool.pool_id))
        )

    def _look(
        self, pool: PoolState, looks: Sequence[Look], site: tuple[str, int], step: int, both_lanes: bool
    ) -> list[HitBatch]:
        looks, slots = self._slots_of(pool, looks, step)
        if not len(slots):
            return []
        where = to_device(torch.from_numpy(slots), pool.records.device)
        if slots_are_right(pool, where, both_lanes):
            return []
        return find_changed(pool, slots, lambda: _entries_of(pool, looks), site, step, both_lanes)

    def _look_later(self, pool: PoolState, looks: Sequence[Look], step: int) -> Sequence[Hit | HitBatch]:
        looks, slots = self._slots_of(pool, looks, step)
        if not len(slots):
            return []
        site, entries = ("sweep", 0), partial(_entries_of, pool, looks)
        return self._looks.look(pool, slots, partial(find_changed, pool, slots, entries, site, step, both_lanes=False))

    def _slots_of(self, pool: PoolState, looks: Sequence[Look], step: int) -> tuple[list[Look], Ints]:
        """Looks as the pool's window cuts them, and the slots behind them."""
        looks, parts = [self._in_window(pool, look) for look in looks], []
        for look in looks:
            granted = np.frombuffer(look.request.row, np.int64)
            parts += [granted[start:end] for start, end in spans(look.ranges)]
            for _, _, read in look.ranges:
                self.longest_wait = max(self.longest_wait, step - read)
        if not parts:
            return looks, np.empty(0, np.int64)
        slots = slots_in(pool.view, np.concatenate(parts))
        slots = slots[slots >= pool.view.null_slots]
        self.bytes_read += len(slots) * pool.view.slot_bytes
        return looks, slots

    def _in_window(self, pool: PoolState, look: Look) -> Look:
        """Without what the next forward of the row does not see: nobody's bytes, once a window has left them."""
        if pool.view.window is None:
            return look
        first = window_start(pool.view, look.request.final_len(pool.pool_id))
        return Look(look.request, [(max(start, first), end, read) for start, end, read in look.ranges if end > first])


def _entries_of(pool: PoolState, looks: Sequence[Look]) -> Entries:
    """What is known of every slot that is looked at."""
    columns = []
    for row, look in enumerate(looks):
        granted = np.frombuffer(look.request.row, np.int64)
        for start, end, read in look.ranges:
            slots = granted[start:end]
            n = len(slots)
            columns.append((slots, np.arange(start, start + n), np.full(n, row), np.full(n, read)))
    names, positions, rows, last_good = map(np.concatenate, zip(*columns, strict=True))
    slots = slots_in(pool.view, names)
    held = slots >= pool.view.null_slots  # freed ones have none, nor those that a slot map sends nowhere
    requests = [look.request.request_id for look in looks]
    return Entries(slots[held], positions[held], rows[held], requests, last_good[held], named(pool, names[held]))
