"""Window eviction: a pool behind a slot map gives up own pages, the full ones stay; bytes get a last re-read before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.entries import Entries
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.checks.content import find_changed
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.pools.slot_maps import slots_in, slots_of_pages, window_start
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.record.layout import COLUMNS, SEAL


class WindowEviction:
    """Reads what leaves. Of a request that has ended, that is what its last re-read left out, since no window shows
    it.
    """

    def __init__(self, state: CanaryState, ledger: Ledger, record_store: RecordStore, coverage: Coverage) -> None:
        self._state, self._ledger, self._record_store, self._coverage = state, ledger, record_store, coverage

    def enter(self, group: str, own_pages: Sequence[int]) -> None:
        """The group's own pages are granted: what their records said was of another full page."""
        slots = slots_of_pages(own_pages, self._state.page_size)
        for pool in self._state.pools_of(group):
            never = np.zeros((len(slots), COLUMNS), np.uint64)
            never[:, SEAL] = pool.seal_term
            self._record_store.write(pool.base + slots, never)

    def reread(self, group: str, pages: Sequence[int], step: int) -> list[ViolationBatch]:
        """R9 and R3 for the final entries on these full pages, in the pools of the group; the map still names them."""
        return [found for pool in self._state.pools_of(group) for found in self._reread_in(pool, pages, step)]

    def _reread_in(self, pool: PoolState, pages: Sequence[int], step: int) -> list[ViolationBatch]:
        size = self._state.page_size
        holders = [self._ledger.holder(page) for page in pages]
        held_by = zip(pages, holders, strict=True)
        firsts = [0 if holder is None else holder.pages.index(page) * size for page, holder in held_by]
        counts = [_num_unread(pool, holder, first, size) for holder, first in zip(holders, firsts, strict=True)]
        offsets = np.concatenate([np.arange(count) for count in counts])
        rows = np.arange(len(pages)).repeat(counts)
        names = np.array(pages, np.int64)[rows] * size + offsets
        slots = slots_in(pool.view, names)
        held = np.flatnonzero(slots >= pool.view.null_slots)
        # what came back from elsewhere may lack what no window showed: that is of an earlier grant
        held = held[self._record_store.are_of(pool.base + slots[held], self._ledger.generations[names[held] // size])]
        if not len(held):
            return []
        self._coverage.bytes_checked += len(held) * pool.view.slot_bytes
        is_row = np.array([holder is not None for holder in holders])[rows]
        positions = np.where(is_row, np.array(firsts)[rows] + offsets, -1)
        ids = ["" if holder is None else holder.request_id for holder in holders]
        entries = Entries(slots, positions, np.where(is_row, rows, -1), ids, names=names).at(held)
        return find_changed(pool, entries.slots, lambda: entries, ("release", 1), step, both_fingerprints=True)


def _num_unread(pool: PoolState, holder: Request | None, first: int, page_size: int) -> int:
    """Entries of a page that begins at this position which are final, and were not read when the request ended."""
    if holder is None:
        return page_size
    end = holder.final_len(pool.pool_id)
    if holder.released:
        end = window_start(pool.view, end)
    return min(max(end - first, 0), page_size)
