"""Outdated snapshots: entries that were written again after the bytes of their page were saved, and before it left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcanary.ledger.ledger import Ledger
from kvcanary.pools.slot_maps import Ints, slots_in, slots_of_pages
from kvcanary.records.record_store import RecordStore, Words
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.record.layout import CHAIN, MASK_32, REQUEST_GENERATION, STEP_SITE, TOKEN_POSITION

IDENTITY = [TOKEN_POSITION, CHAIN, REQUEST_GENERATION]


class Outdated(NamedTuple):
    """An entry that comes back as it was saved, and not as it left.

    place: number of its slot among those that come back;  step: in which it was written last
    """

    pool: PoolState
    place: int
    slot: int
    position: int
    step: int


class LeftRecords:
    """What records said of pages that were saved, when a group behind a slot map gave up its own pages for them."""

    def __init__(self, state: CanaryState, record_store: RecordStore, ledger: Ledger) -> None:
        self._state, self._record_store, self._ledger = state, record_store, ledger
        self._saved: set[tuple[str, int]] = set()
        self._left: dict[tuple[int, int], Words] = {}

    def save(self, group: str, pages: Sequence[int]) -> None:
        """Bytes of these full pages are copied elsewhere."""
        self._saved.update((group, page) for page in pages)

    def leave(self, group: str, pages: Sequence[int]) -> None:
        """The map leads to the group's own pages for the last time."""
        if not self._saved:
            return
        size = self._state.page_size
        for page in [page for page in pages if (group, page) in self._saved]:
            for pool in self._state.pools_of(group):
                slots = slots_in(pool.view, slots_of_pages([page], size)).clip(0)
                self._left[pool.pool_id, page] = self._record_store.table[pool.base + slots]

    def outdated(self, pool: PoolState, pages: Sequence[int], records: Words) -> list[Outdated]:
        """Final entries on these pages that are older in the records [n, 8] that come back than in those that left."""
        size, found = self._state.page_size, list[Outdated]()
        for number, page in enumerate(pages):
            left = self._left.pop((pool.pool_id, page), None)
            if left is None:
                continue
            back = records[number * size : (number + 1) * size]
            positions = (left[:, TOKEN_POSITION] >> 32).view(np.int64)
            is_older = (back[:, IDENTITY] != left[:, IDENTITY]).any(1) & self._is_final(pool, page, left, positions)
            slots = slots_in(pool.view, slots_of_pages([page], size))
            for offset in np.flatnonzero(is_older).tolist():
                step = int(left[offset, STEP_SITE]) & MASK_32
                place = number * size + offset
                found.append(Outdated(pool, place, int(slots[offset]), int(positions[offset]), step))
        return found

    def _is_final(self, pool: PoolState, page: int, left: Words, positions: Ints) -> NDArray[np.bool_]:
        """Written under the grant that the page has, and final by now."""
        is_current: NDArray[np.bool_] = left[:, REQUEST_GENERATION] >> 32 == np.uint64(self._ledger.generations[page])
        holder = self._ledger.holder(page)
        if holder is not None:
            is_current &= positions < holder.final_len(pool.pool_id)
        return is_current
