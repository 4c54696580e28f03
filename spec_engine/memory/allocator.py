"""Pages: who is free, who is taken. Page 0 is the null page and is never handed out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvcanary.invariants import DoubleFreeError, PageLeakError, PoolExhaustedError


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
        """Take ``count`` pages; PoolExhaustedError, with nothing taken, when fewer are free."""
        if count > len(self._free):
            raise PoolExhaustedError(
                f"{count} pages needed, {len(self._free)} of {self.num_pages} free: raise max_total_tokens "
                "or lower max_running_requests"
            )
        pages = [heapq.heappop(self._free) for _ in range(count)]
        self._taken.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; DoubleFreeError, with nothing freed, when one of them is not taken or named twice."""
        stray = [page for page in pages if page not in self._taken]
        if stray or len(set(pages)) != len(pages):
            raise DoubleFreeError(f"pages {list(pages)} freed, but {stray or 'some of them twice'} not allocated")
        self._taken.difference_update(pages)
        for page in pages:
            heapq.heappush(self._free, page)

    def check_accounting(self, owned: int) -> None:
        """PageLeakError unless free pages plus the ``owned`` pages of live requests are the whole pool."""
        if len(self._free) + owned != self.num_pages:
            raise PageLeakError(f"{len(self._free)} pages free + {owned} owned by requests != {self.num_pages} in all")
