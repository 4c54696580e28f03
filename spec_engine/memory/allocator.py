"""Pages: who is free, who is taken. Page 0 is the null page and is never handed out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvcanary.invariants import (
    check_pages_add_up,
    check_pages_available,
    check_pages_freed,
    check_pages_granted,
)


class PageAllocator:
    """Hands out page ids 1..num_pages, lowest first, and takes them back exactly once."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(1, num_pages + 1))  # a heap: sorted lists are heaps
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages; PoolExhaustedError, with nothing taken, when fewer are free.

        PageAliasError, NullPageError or PoolSizeError where the free list holds a page that is not free to give.
        """
        check_pages_available(count, len(self._free), self.num_pages)
        pages = [heapq.heappop(self._free) for _ in range(count)]
        check_pages_granted(pages, self._taken, self.num_pages)
        self._taken.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; DoubleFreeError, with nothing freed, when one of them is not taken or named twice."""
        check_pages_freed(pages, self._taken)
        self._taken.difference_update(pages)
        for page in pages:
            heapq.heappush(self._free, page)

    def check_accounting(self, owned: int) -> None:
        """PageLeakError unless free pages plus the ``owned`` pages of live requests are the whole pool."""
        check_pages_add_up(len(self._free), owned, self.num_pages)
