"""Pages: who is free, who is taken, who waits. Page 0 is the null page and is never handed out."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from kvcanary.faults import seam
from kvcanary.invariants import (
    check_generations,
    check_pages_available,
    check_pages_freed,
    check_pages_granted,
    check_pages_ready,
    check_pages_shared,
)
from spec_engine.memory.accounting import PoolAccounting


class PageAllocator:
    """Hands out page ids 1..num_pages, lowest first. A page is free again when its last holder has given it back.

    Pages that come back wait ``quarantine`` steps, so that a read which is late finds nobody else's bytes. They count
    as free; under pressure the longest waiting come back early, but never in the step that freed them.
    """

    def __init__(self, num_pages: int, quarantine: int = 0) -> None:
        self.num_pages, self.quarantine = num_pages, quarantine
        self._step = 0
        self._waiting: deque[tuple[int, int]] = deque()  # (step in which it was freed, page)
        self._free = list(range(1, num_pages + 1))  # a heap: sorted lists are heaps
        self._references: dict[int, int] = {}  # of each page that somebody holds
        self._generations = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        """Free pages, those in quarantine included: what an estimate may count on."""
        return len(self._free) + len(self._waiting)

    def num_free_with(self, num_cached: int, cached: Callable[[], Collection[int]]) -> int:
        """Free pages if these cached ones were evicted."""
        return self.num_free + num_cached

    def usable_pages(self, pages: Sequence[int]) -> int:
        """How many pages of a cached prefix a request can go on from: all."""
        return len(pages)

    @property
    def num_quarantined(self) -> int:
        return len(self._waiting)

    @property
    def num_ready(self) -> int:
        """Free pages that can be handed out in this very step."""
        return self.num_free - sum(step == self._step for step, _ in self._waiting)

    @property
    def references(self) -> Mapping[int, int]:
        """How many hold each page that is not free; read only."""
        return MappingProxyType(self._references)

    def generations_of(self, pages: Sequence[int]) -> list[int]:
        """A number for each page that grows when it is handed out (then it is odd) and when it is free again."""
        return [self._generations[page] for page in pages]

    def unused(self, count: int) -> list[int]:
        """So many free pages that wait for nothing, which stay free; fewer where there are not as many."""
        return self._free[:count]

    def begin_step(self, step: int) -> None:
        """Pages that have waited long enough are free."""
        self._step = step
        while self._waiting and step - self._waiting[0][0] >= self.quarantine:
            heapq.heappush(self._free, self._waiting.popleft()[1])

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages, one reference each; nothing is taken where an error is raised.

        PoolExhaustedError: fewer are free. PagesQuarantinedError: as many are free, but some since this step only; the
        next step can have them. PageAliasError, NullPageError or PoolSizeError: the free list holds a page that is not
        free to give.
        """
        check_pages_available(count, self.num_free, self.num_pages)
        if count > len(self._free):
            check_pages_ready(count, self.num_ready, self.num_free - self.num_ready)
        while len(self._free) < count:
            heapq.heappush(self._free, self._waiting.popleft()[1])
        pages = [heapq.heappop(self._free) for _ in range(count)]
        pages = seam("lifetime.two_owners", pages, taken=self._references)
        check_pages_granted(pages, self._references, self.num_pages)
        for page in pages:
            self._references[page] = 1
            self._generations[page] += 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of ``pages``; StalePageError, with nothing shared, when one of them is free."""
        check_pages_shared(pages, self._references)
        for page in pages:
            self._references[page] += 1

    def check_granted(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """DoubleFreeError where one of ``pages`` was freed since it was of these, whoever holds it by now."""
        check_generations(pages, generations, self.generations_of(pages))

    def free(self, pages: Sequence[int]) -> None:
        """One holder of each of ``pages`` gives it back; DoubleFreeError, with nothing freed, when nobody holds one."""
        check_pages_freed(pages, self._references)
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._take_back(page)

    def _take_back(self, page: int) -> None:
        del self._references[page]
        self._generations[page] += 1
        if self.quarantine:
            self._waiting.append((self._step, page))
        else:
            heapq.heappush(self._free, page)

    def check_accounting(self, owned: int, evictable: int = 0, protected: int = 0) -> None:
        """PageLeakError unless free pages, the ``owned`` ones of live requests and the cached ones are the pool."""
        self.accounting(owned, evictable, protected).check()

    def accounting(self, owned: int, evictable: int = 0, protected: int = 0) -> PoolAccounting:
        """Where all pages are, by what their holders say of themselves."""
        return PoolAccounting(
            total=self.num_pages,
            free=self.num_free - self.num_quarantined,
            quarantined=self.num_quarantined,
            owned=owned,
            evictable=evictable,
            protected=protected,
        )
