"""Window pool: layers that see only the last ``window`` tokens keep only those, behind a map of the full slots.

Requests, tables and plans name slots of the full pool. Every page of it is granted together with one of the window
pool; that one is given back as soon as no reader can see its positions any more. Of one row:

[0, evicted)  no window page    [evicted, committed)  seen, or in a page that is    [committed, allocated)  reserve
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvcanary import PoolView, first_visible
from kvcanary.invariants import (
    check_pages_ready,
    check_protected,
    check_window_mapped,
    check_window_pages,
    check_window_slide,
)
from spec_engine.memory.accounting import PoolAccounting
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.host_rows import slots_of
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.pools.slot_map import SlotMap

if TYPE_CHECKING:
    from kvcanary import CanaryManager

GROUP = "window"


class WindowRow(NamedTuple):
    """One request: its pages of the full pool in row order, and the committed length that the host knows.

    No forward, in flight or to come, reads for a position before ``committed_len``: the host's length is never ahead.
    """

    request_id: str
    pages: Sequence[int]
    committed_len: int


class WindowPool:
    """The allocator of a full pool and of its window pool: use it in the place of the full pool's.

    slot_map: ``[full slots] int64`` on the pools' device: the window slot of a full slot, 0 where it has none
    """

    def __init__(
        self, full: PageAllocator, window_pages: PageAllocator, *, window: int, page_size: int, device: torch.device
    ) -> None:
        self.window, self.page_size = window, page_size
        self.step = 0
        self._full, self._pages = full, window_pages
        self._map = SlotMap((full.num_pages + 1) * page_size, device)
        self.slot_map = self._map.slots
        self._page_of: dict[int, int] = {}  # full page: its window page
        self._num_evicted = 0  # full pages that are taken and have none
        self._evicted_lens: dict[str, int] = {}
        self._canary: CanaryManager | None = None

    def watch(self, canary: CanaryManager | None) -> None:
        """Who is told from now on which window pages are granted, and which are about to be free."""
        self._canary = canary

    @property
    def num_free(self) -> int:
        """Pages that can be had: each takes one of both pools."""
        return min(self._full.num_free, self._pages.num_free)

    @property
    def num_ready(self) -> int:
        """Pages that can be had in this very step."""
        return min(self._full.num_ready, self._pages.num_ready)

    def num_free_with(self, num_cached: int, cached: Callable[[], Collection[int]]) -> int:
        """Free pages if these cached ones were evicted: not each of them has a window page to give back."""
        mapped = self._num_mapped(cached()) if num_cached else 0
        return min(self._full.num_free + num_cached, self._pages.num_free + mapped)

    def can_grant(self, num_full: int, num_window: int, cached: Collection[int]) -> bool:
        """Whether so many pages of each pool could be had if these cached ones were evicted."""
        return num_full <= self._full.num_free + len(cached) and num_window <= self._pages.num_free + self._num_mapped(
            cached
        )

    def num_held(self, request_id: str, pages: Sequence[int]) -> int:
        """Window pages of a row; none of a request that waits."""
        return len(pages) - self._evicted_lens.get(request_id, 0) // self.page_size

    @property
    def num_pages(self) -> int:
        """Of the full pool."""
        return self._full.num_pages

    @property
    def num_own_pages(self) -> int:
        return self._pages.num_pages

    @property
    def references(self) -> Mapping[int, int]:
        """How many hold each page of the full pool that is not free; read only."""
        return self._full.references

    def begin_step(self, step: int) -> None:
        self.step = step
        self._full.begin_step(step)
        self._pages.begin_step(step)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages of both pools, and give those of the full one.

        PoolExhaustedError, or PagesQuarantinedError where some are free since this step only: none is taken of either.
        """
        windows = self._pages
        check_window_pages(count, windows.num_free, windows.num_pages)
        check_pages_ready(count, windows.num_ready, windows.num_free - windows.num_ready)
        pages = self._full.allocate(count)
        own = windows.allocate(count)
        self._page_of.update(zip(pages, own, strict=True))
        self._map.write(slots_of(pages, self.page_size), slots_of(own, self.page_size))
        if self._canary is not None:
            self._canary.on_map(GROUP, pages, own)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """One holder gives pages of the full pool back; those of the last one have no window page any more."""
        self._full.free(pages)
        free = [page for page in pages if page not in self._full.references]
        mapped = [page for page in free if page in self._page_of]
        self._num_evicted -= len(free) - len(mapped)
        self._unmap(mapped)

    def generations_of(self, pages: Sequence[int]) -> list[int]:
        """Of pages of the full pool."""
        return self._full.generations_of(pages)

    def check_granted(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """The same for pages of the full pool."""
        self._full.check_granted(pages, generations)

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of these pages, and for their window pages."""
        self._full.share(pages)

    def start(self, request_id: str, protected_len: int = 0) -> None:
        """A request whose first ``protected_len`` positions a prefix cache holds: their window pages are the cache's.

        WindowMapError where that is not the end of a page.
        """
        check_protected(request_id, protected_len, self.page_size)
        self._evicted_lens[request_id] = protected_len

    def slide(self, row: WindowRow) -> int:
        """Give back the window pages that nobody sees from ``row.committed_len`` on; how many.

        The cursor of the request stops at a page boundary before the window, and so before the reserve. Pages that
        others hold too stay, since these may see them still.
        """
        done, size = self._evicted_lens[row.request_id], self.page_size
        end = max(done, first_visible(row.committed_len, self.window) // size * size)
        check_window_slide(row.request_id, end, row.committed_len, len(row.pages) * size)
        leaving = [page for page in row.pages[done // size : end // size] if self._full.references[page] == 1]
        self.evict(leaving)
        self._evicted_lens[row.request_id] = end
        return len(leaving)

    def evict(self, pages: Sequence[int]) -> None:
        """These pages of the full pool need no window page any more; WindowMapError where one has none."""
        check_window_mapped("evict", pages, self._page_of, 0, self.page_size)
        self._unmap(pages)
        self._num_evicted += len(pages)

    def forget(self, request_id: str) -> None:
        """The request is over or retracted; its pages are freed as any others."""
        del self._evicted_lens[request_id]

    def translate(self, full_slots: Tensor) -> Tensor:
        """Window slots of ``full_slots``, int64 of any shape: 0 where there is none, -1 for -1. May be captured."""
        return self._map.translate(full_slots)

    def view(self, pool: KVPool) -> PoolView:
        """The window pool as the canary sees it: through the map."""
        return replace(pool.view(), group=GROUP, slot_map=self.slot_map, window=self.window)

    def check_mapped(self, row: WindowRow) -> None:
        """WindowMapError unless every position that a reader sees or a forward writes has its window slot."""
        start = first_visible(row.committed_len, self.window)
        check_window_mapped(row.request_id, row.pages, self._page_of, start, self.page_size)

    def usable_pages(self, pages: Sequence[int]) -> int:
        """How many pages of a cached prefix a request can go on from: those before its end must still be seen."""
        lacks = [place for place, page in enumerate(pages) if page not in self._page_of]
        for count in range(len(pages), 0, -1):
            start = first_visible(count * self.page_size, self.window) // self.page_size
            if not any(start <= place < count for place in lacks):
                return count
        return 0

    def accounting(self, owned: int, evictable: int = 0, protected: int = 0) -> PoolAccounting:
        """Where all pages of the full pool are."""
        return self._full.accounting(owned, evictable, protected)

    def check_accounting(self, owned: int, evictable: int = 0, protected: int = 0) -> None:
        """PageLeakError unless both pools add up; all three count pages of the full pool that are held."""
        self.accounting(owned, evictable, protected).check()
        self._pages.check_accounting(owned + evictable + protected - self._num_evicted)

    def booked_slots(self, pages: Sequence[int]) -> Tensor:
        """``[len(pages) * page_size] int64`` on the host: what the map must say of these pages; 0 where evicted."""
        slots = slots_of([self._page_of.get(page, 0) for page in pages], self.page_size)
        return slots.where(slots >= self.page_size, 0)

    def mapped_slots(self, pages: Sequence[int]) -> Tensor:
        """``[len(pages) * page_size] int64`` on the host: what the map says of these pages."""
        return self.slot_map[slots_of(pages, self.page_size).to(self.slot_map.device)].cpu()

    def _num_mapped(self, pages: Collection[int]) -> int:
        return sum(page in self._page_of for page in pages)

    def _unmap(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        own = [self._page_of[page] for page in pages]
        if self._canary is not None:
            self._canary.on_unmap(GROUP, pages, own)
        for page in pages:
            del self._page_of[page]
        self._map.write(slots_of(pages, self.page_size), 0)
        self._pages.free(own)
