"""The KV memory of one engine: pages, rows and the prefix cache at work, and what the canary is told of their lives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcanary.invariants import check_estimate, check_lengths
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.prefix_cache import PrefixCache
from spec_engine.memory.prefix_tree import PrefixTree
from spec_engine.memory.request_table import RequestTable
from spec_engine.memory.sizing import step_pages
from spec_engine.request import Request

if TYPE_CHECKING:
    from kvcanary import CanaryManager


class KVMemory:
    """Gives requests rows and pages and takes them back; every change is told to the canary."""

    def __init__(
        self,
        allocator: PageAllocator,
        table: RequestTable,
        canary: CanaryManager | None,
        *,
        is_drafting: bool,
        caches_prefixes: bool,
    ) -> None:
        self.allocator, self.table, self.canary = allocator, table, canary
        self.caches_prefixes = caches_prefixes
        self.page_size = table.page_size
        self.cache = PrefixCache(allocator, PrefixTree(table.page_size, bigram=is_drafting), table)

    @property
    def num_available(self) -> int:
        """Pages that could be granted: free, waiting in quarantine, or cached and used by nobody."""
        return self.cache.num_available

    def admit(self, request: Request, running: Iterable[Request] = ()) -> None:
        """Take a row for a request and begin it with what is cached of its tokens, by now or by the ``running``."""
        request.begin()
        request.row = self.table.acquire()
        known = request.tokens
        if self.canary is not None:
            self.canary.admit(request.request_id, known, salt=request.salt)
        if not self.caches_prefixes:
            return
        known = known[: request.prefill_len]
        for other in running:
            if other is not request and self._helps(other, request, known):
                self._publish(other)
        request.committed_len = request.cached_len = self.cache.acquire(request, known, request.salt)
        if self.canary is not None and request.pages:
            self.canary.on_acquire(request.request_id, request.pages)

    def grow(self, request: Request, end: int, reserve: int, most: int) -> int:
        """Own the pages of row positions [0, end + reserve); how many were taken for it.

        ``most``: what admission counted with.
        """
        missing = step_pages(end, len(request.pages), reserve, self.page_size)
        if missing:
            self.make_room(missing)
            pages = self.allocator.allocate(missing)
            self.table.append_pages(request.row, len(request.pages) * self.page_size, pages)
            request.pages += pages
            if self.canary is not None:
                self.canary.on_alloc(request.request_id, pages)
        taken, name = len(request.pages), request.request_id
        check_estimate(name, taken, end, reserve, self.page_size, most)
        check_lengths(name, end, taken * self.page_size, self.table.width)
        return missing

    def make_room(self, count: int) -> bool:
        """Let cached pages go until ``count`` are free; whether so many can be granted in this very step."""
        evicted = self.cache.make_room(count)
        if evicted and self.canary is not None:
            self.canary.on_evict(evicted)
        return count <= self.allocator.num_ready

    def release(self, request: Request, publish: bool) -> bool:
        """Take everything back; whether its bytes were to the end what had been written.

        ``publish``: the prefix cache keeps the whole pages of what is committed.
        """
        name, pages = request.request_id, request.pages
        is_intact = self.canary is None or self.canary.release(name, request.committed_len)
        if publish and is_intact and self.caches_prefixes:
            result = self.cache.retire(request, *self._final(request), request.salt)
            self._tell_shared(name, result.added)
        else:
            self.cache.release(request)
        if self.canary is not None:
            self.canary.on_free(name, pages)
        return is_intact

    def check_accounting(self, requests: Iterable[Request]) -> None:
        """PageLeakError unless every page is free, waits, or is held by a request or the cache."""
        self.cache.accounting(requests).check()

    # sharing what running requests have

    def _helps(self, other: Request, request: Request, known: Sequence[int]) -> bool:
        """Whether a running request has more whole pages of these tokens than the cache.

        One that is admitted in the same step, but later, has none yet, whatever its lengths were before.
        """
        if other.salt != request.salt or not other.pages or not other.is_prefilled:
            return False
        tree = self.cache.tree
        return (
            tree.num_pages(_common(other.tokens, known)) * self.page_size > tree.match(known, request.salt).num_tokens
        )

    def _publish(self, request: Request) -> None:
        """Cache the whole pages of what a running request has committed; it reads the cache's where there were some."""
        before = list(request.pages)
        result = self.cache.publish(request, *self._final(request), request.salt)
        self._tell_shared(request.request_id, result.added)
        if self.canary is not None:
            for page, kept in zip(before, request.pages, strict=True):
                if page != kept:
                    self.canary.on_deduplicate(request.request_id, page, kept)

    def _final(self, request: Request) -> tuple[list[int], int]:
        """The tokens that committed pages are found by, and the committed length."""
        return request.tokens[: request.committed_len + self.cache.tree.bigram], request.committed_len

    def _tell_shared(self, name: str, pages: list[int]) -> None:
        if pages and self.canary is not None:
            self.canary.on_share(name, pages)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens in which two lists begin alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
