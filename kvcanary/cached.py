"""Cached pages: those that only a prefix cache holds are read again in turn, as running rows are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.config import share_of
from kvcanary.content import find_changed
from kvcanary.entries import Entries
from kvcanary.intake import HitBatch
from kvcanary.ledger import Ledger
from kvcanary.state import CanaryState


class CachedSweep:
    """Plans which pages of the cache are read now, oldest look first.

    read_at: [num_pages] int64, step of the last look at each page
    """

    def __init__(self, state: CanaryState, ledger: Ledger) -> None:
        self._state, self._ledger = state, ledger
        self.read_at = np.zeros(len(ledger.pages), np.int64)
        self.bytes_read = 0
        self.longest_wait = 0

    def slice(self, step: int, stride: int) -> list[HitBatch]:
        """So many pages that with a slice every `stride` steps each is read once in a rotation."""
        pages = self._pages()
        if not len(pages):
            return []
        count = share_of(len(pages), stride)
        oldest = pages[np.argsort(self.read_at[pages], kind="stable")[:count]]
        return self.look(oldest.tolist(), step)

    def look(self, pages: Sequence[int], step: int) -> list[HitBatch]:
        """R9 and R3 for the slots of these pages, whose entries are all final."""
        if not len(pages):
            return []
        size = self._state.page_size
        slots = (np.array(pages)[:, None] * size + np.arange(size)).ravel()
        nobody = np.full(len(slots), -1)
        entries = Entries(slots, nobody, nobody, (), self.read_at[slots // size])
        self.longest_wait = max(self.longest_wait, step - int(self.read_at[list(pages)].min()))
        where = torch.from_numpy(slots).to(self._state.records.device)
        hits: list[HitBatch] = []
        for pool in self._state.pools:
            hits += find_changed(pool, where, lambda: entries, ("sweep", 1), step, both_lanes=False)
            self.bytes_read += len(slots) * pool.view.slot_bytes
        self.read_at[list(pages)] = step
        return hits

    def left(self, pages: Sequence[int], step: int) -> None:
        """Rows have left these pages after a last look at their bytes: what a cache still holds waits from now on."""
        self.read_at[[page for page in pages if page >= 0]] = step

    def waiting(self, step: int) -> int:
        """Steps since the last look at the cached page that waits longest."""
        pages = self._pages()
        return int(step - self.read_at[pages].min()) if len(pages) else 0

    def _pages(self) -> NDArray[np.int64]:
        held = self._ledger.pages
        return (held.published & (held.refcounts == 0)).nonzero()[0]
