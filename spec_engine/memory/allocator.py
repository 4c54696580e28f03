"""Pages: who is free, who is taken, who waits. Page 0 is the null page and is never handed out."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from kvcanary.invariants import (
    check_pages_add_up,
    check_pages_available,
    check_pages_freed,
    check_pages_granted,
)


class PageAllocator:
    """Hands out page ids 1..num_pages, lowest first, and takes them back exactly once.

    Pages that come back wait ``quarantine`` steps, so that a read which is late finds nobody else's bytes. Under
    pressure they wait until the next step only: they count as free.
    """

    def __init__(self, num_pages: int, quarantine: int = 0) -> None:
        self.num_pages, self.quarantine = num_pages, quarantine
        self._step = 0
        self._waiting: deque[tuple[int, int]] = deque()  # (step in which it was freed, page)
        self._free = list(range(1, num_pages + 1))  # a heap: sorted lists are heaps
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._waiting)

    @property
    def num_quarantined(self) -> int:
        return len(self._waiting)

    def begin_step(self, step: int) -> None:
        """Pages that have waited long enough are free."""
        self._step = step
        while self._waiting and step - self._waiting[0][0] >= self.quarantine:
            heapq.heappush(self._free, self._waiting.popleft()[1])

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages; PoolExhaustedError, with nothing taken, when fewer are free.

        PageAliasError, NullPageError or PoolSizeError where the free list holds a page that is not free to give.
        """
        check_pages_available(count, self.num_free, self.num_pages)
        while len(self._free) < count:
            heapq.heappush(self._free, self._waiting.popleft()[1])
        pages = [heapq.heappop(self._free) for _ in range(count)]
        check_pages_granted(pages, self._taken, self.num_pages)
        self._taken.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; DoubleFreeError, with nothing freed, when one of them is not taken or named twice."""
        check_pages_freed(pages, self._taken)
        self._taken.difference_update(pages)
        for page in pages:
            if self.quarantine:
                self._waiting.append((self._step, page))
            else:
                heapq.heappush(self._free, page)

    def check_accounting(self, owned: int) -> None:
        """PageLeakError unless free and waiting pages plus the ``owned`` ones of live requests are the whole pool."""
        check_pages_add_up(self.num_free, owned, self.num_pages)
