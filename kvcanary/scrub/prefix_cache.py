"""Cached pages: those that only a prefix cache holds are read again in turn, as running rows are, and by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcanary.calls.entries import Entries, named
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.checks.content import find_changed
from kvcanary.config import share_of
from kvcanary.ledger.ledger import Ledger
from kvcanary.native.layout import PAGES
from kvcanary.pools.slot_maps import Ints, slots_in, slots_of_pages
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.rereads import Rereads

#: Within which every cached page is read again, however long steps take, as long as somebody asks now and then.
SCRUB_SECONDS = 60.0
NO_PAGES = np.empty(0, np.int64)
ASK_SECONDS = 1.0  # between two answers by the clock

Asked = tuple[PoolState, Ints, Callable[[Ints], list[ViolationBatch]]]


class PrefixScrubber:
    """Plans which pages of the cache are read now, oldest re-read first.

    is_on:   whether bytes are compared again at all
    read_at: [num_pages] int64, step of the last re-read at each page
    clock:   seconds, counting up
    """

    def __init__(
        self,
        state: CanaryState,
        ledger: Ledger,
        rereads: Rereads,
        is_on: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._ledger, self._rereads, self._is_on, self.clock = state, ledger, rereads, is_on, clock
        self.read_at = np.zeros(len(ledger.pages), np.int64)
        self._seconds_at = np.zeros(len(ledger.pages))  # the same by the clock
        self._asked_at = clock()
        self.bytes_read = self.longest_wait = 0

    def slice(self, step: int, stride: int) -> list[Violation | ViolationBatch]:
        """So many pages that with a slice every `stride` steps each is read once in a rotation.

        What fires at once; on a GPU the host collects it with the step. By steps, and not by the clock alone: a host
        may never come to ask `overdue`, and a replay reads in a step what was read in it.
        """
        pages = self._pages()
        if not len(pages):
            return []
        count = share_of(len(pages), stride)
        oldest = pages[np.argsort(self.read_at[pages], kind="stable")[:count]]
        return [
            violation
            for pool, slots, judge in self._reread(oldest.tolist(), step)
            for violation in self._rereads.reread(pool, slots, judge)
        ]

    def overdue(self) -> list[int]:
        """Pages that have waited for half of SCRUB_SECONDS, as many as bring all cached ones within half of the rest.

        Slices are enough where steps are short; it answers about once a second, and may be asked in every step.
        """
        now = self.clock()
        since = now - self._asked_at
        if since < ASK_SECONDS or not self._is_on:
            return []
        self._asked_at = now
        pages = self._pages()
        at = self._seconds_at[pages]
        late = now - at > SCRUB_SECONDS / 2
        count = math.ceil(len(pages) * since * 4 / SCRUB_SECONDS)
        return pages[late][np.argsort(at[late], kind="stable")[:count]].tolist()

    def reread(self, pages: Sequence[int], step: int) -> list[ViolationBatch]:
        """R9 and R3 for the slots of these pages, whose entries are all final."""
        return [violation for _, slots, judge in self._reread(pages, step) for violation in judge(slots)]

    def _reread(self, pages: Sequence[int], step: int) -> list[Asked]:
        """By pool the slots of these pages, and what says which of them changed; the pages count as read."""
        if not len(pages):
            return []
        slots = slots_of_pages(pages, self._state.page_size)
        self.longest_wait = max(self.longest_wait, step - int(self.read_at[list(pages)].min()))
        rereads = [self._reread_in(pool, slots, step) for pool in self._state.pools]
        self._note(list(pages), step)
        return rereads

    def _reread_in(self, pool: PoolState, names: Ints, step: int) -> Asked:
        slots = slots_in(pool.view, names)
        held = slots >= pool.view.null_slots  # a window may have left the others
        slots, names, nobody = slots[held], names[held], np.full(int(held.sum()), -1)
        self.bytes_read += len(slots) * pool.view.slot_bytes
        entries = Entries(slots, nobody, nobody, (), self.read_at[names // self._state.page_size], named(pool, names))
        label = ("sweep", 1), step
        return pool, slots, lambda own: find_changed(pool, own, lambda: entries, *label, both_fingerprints=False)

    def left(self, pages: Sequence[int], step: int) -> None:
        """Rows have left these pages after a last re-read of them: what a cache still holds waits from now on."""
        self._note([page for page in pages if page >= 0], step)

    def waiting(self, step: int) -> int:
        """Steps since the last re-read at the cached page that waits longest."""
        pages = self._pages()
        return int(step - self.read_at[pages].min()) if len(pages) else 0

    def _note(self, pages: list[int], step: int) -> None:
        self.read_at[pages], self._seconds_at[pages] = step, self.clock()

    def _pages(self) -> NDArray[np.int64]:
        pages = self._ledger.pages
        if not pages.struct[PAGES.num_published]:
            return NO_PAGES
        published = pages.published.nonzero()[0]  # as quick as a large pool allows
        return published[pages.refcounts[published] == 0]
