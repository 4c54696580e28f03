"""Who owns which page: a request's pages are a head that it shares with the prefix tree, and a private tail.

``[0, num_shared)`` of its pages are the tree's too, final and locked; ``[num_shared, len(pages))`` are its own. Each
row that names a page holds one reference of it, the tree holds one more for every cached page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from kvcanary.faults import seam
from kvcanary.invariants import check_pages_final
from spec_engine.memory.accounting import PoolAccounting, check_holders
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.prefix_tree import InsertResult, Node, PrefixTree
from spec_engine.memory.pools.window_pool import WindowPool
from spec_engine.memory.request_table import RequestTable


class PageHolder(Protocol):
    """What a request says of its memory.

    generations: of its pages, as they were when it took them
    node:        the end of its shared head in the tree, None: it shares nothing
    """

    request_id: str
    row: int
    pages: list[int]
    generations: list[int]
    num_shared: int
    node: Node | None


class PrefixCache:
    """Moves pages between requests, prefix tree and allocator; references, locks and rows follow.

    Nothing here tells a canary: the pages that it must be told of are returned.
    """

    def __init__(self, allocator: PageAllocator | WindowPool, tree: PrefixTree, table: RequestTable) -> None:
        self.allocator, self.tree, self.table = allocator, tree, table

    @property
    def num_available(self) -> int:
        """Pages that can be had without taking them from a request: free, waiting, or evictable."""
        return self.allocator.num_free_with(self.tree.num_evictable, self.tree.evictable_pages)

    def num_released_by(self, requests: Sequence[PageHolder]) -> int:
        """By how much ``num_available`` would grow if these were released: their tails, and heads nobody else holds."""
        tails = sum(len(request.pages) - request.num_shared for request in requests)
        return tails + self.tree.num_held_by(request.node for request in requests if request.node is not None)

    def acquire(self, request: PageHolder, tokens: Sequence[int], salt: str = "", adapter: str = "") -> int:
        """Give a request without pages the cached prefix of its ``tokens``; returns how many need no prefill.

        One token at least is left to forward. StalePageError when the tree points at a free page.
        """
        tokens = tokens if self.tree.bigram else tokens[:-1]
        tokens = seam("identity.plain_key", tokens, tree=self.tree, root=(salt, adapter))
        match = self.tree.match(tokens, salt, adapter)
        usable = self.allocator.usable_pages(match.pages)
        if usable < len(match.pages):  # what is seen from the end of the others has left their window
            match = self.tree.match(tokens[: usable * self.tree.page_size + self.tree.bigram], salt, adapter)
        match = seam("identity.page_of_another_prompt", match, tree=self.tree)
        self.allocator.share(match.pages)
        self.tree.lock(match.node)
        self.table.append_pages(request.row, 0, match.pages)
        request.pages, request.num_shared, request.node = match.pages, len(match.pages), match.node
        request.generations = self.allocator.generations_of(match.pages)
        return match.num_tokens

    def publish(
        self, request: PageHolder, tokens: Sequence[int], committed_len: int, salt: str = "", adapter: str = ""
    ) -> InsertResult:
        """Cache the whole pages of ``tokens`` while the request goes on; its duplicates become the tree's pages.

        WritablePageError when they reach beyond ``committed_len``.
        """
        result = self._insert(request, tokens, committed_len, salt, adapter)
        if result.duplicates:
            own = set(request.pages)
            self.allocator.share([page for page in result.pages if page not in own])
            self.allocator.free(result.duplicates)
            kept = seam("lifetime.duplicate_not_remapped", result.pages, own=request.pages)
            self.table.replace_pages(request.row, kept)
            request.pages[: len(result.pages)] = result.pages
            request.generations[: len(result.pages)] = self.allocator.generations_of(result.pages)
        self.tree.lock(result.node)
        if request.node is not None:
            self.tree.unlock(request.node)
        request.node, request.num_shared = result.node, len(result.pages)
        return result

    def retire(
        self, request: PageHolder, tokens: Sequence[int], committed_len: int, salt: str = "", adapter: str = ""
    ) -> InsertResult:
        """Cache what a finished request computed, and release the rest."""
        result = self._insert(request, tokens, committed_len, salt, adapter)
        self.release(request)
        return result

    def release(self, request: PageHolder) -> None:
        """Give back all of a request's pages and its row, caching nothing: it is retracted or aborted.

        DoubleFreeError where somebody has freed one of them meanwhile.
        """
        self.allocator.check_granted(request.pages, request.generations)
        self.table.release(request.row)
        if request.node is not None:
            self.tree.unlock(request.node)
        pages = seam("lengths.unaligned_release", request.pages)
        self.allocator.free(seam("lifetime.double_free", pages))
        request.row, request.pages, request.generations = 0, [], []
        request.num_shared, request.node = 0, None

    def make_room(self, count: int) -> list[int]:
        """Evict until ``count`` pages are free, or nothing is left to evict; returns the evicted pages.

        Where freed pages wait in quarantine they can be handed out in the next step only.
        """
        evicted: list[int] = []
        while pages := self.tree.evict(count - self.allocator.num_free):
            self.allocator.free(pages)
            evicted += pages
        return evicted

    def drop(self, pages: Collection[int]) -> list[int]:
        """Forget these pages and those behind them, but what a request holds; returns the pages that are free now."""
        dropped = self.tree.drop(pages)
        self.allocator.free(dropped)
        return dropped

    def accounting(self, requests: Iterable[PageHolder]) -> PoolAccounting:
        """Where all pages are; ``requests`` are all that hold some."""
        return self.allocator.accounting(*self._held(requests))

    def check_accounting(self, requests: Iterable[PageHolder]) -> None:
        """PageLeakError unless these requests, the cache and the allocator's pools account for every page."""
        self.allocator.check_accounting(*self._held(requests))

    def check_references(self, requests: Iterable[PageHolder]) -> None:
        """ReferenceCountError unless references, rows and tree agree; reads every page, so for idle moments."""
        check_holders(self.allocator.references, [request.pages for request in requests], self.tree.pages)

    def _held(self, requests: Iterable[PageHolder]) -> tuple[int, int, int]:
        """Pages that requests alone hold, and those of the cache: evictable, protected."""
        owned = sum(len(request.pages) - request.num_shared for request in requests)
        return owned, self.tree.num_evictable, self.tree.num_protected

    def _insert(
        self, request: PageHolder, tokens: Sequence[int], committed_len: int, salt: str, adapter: str
    ) -> InsertResult:
        num_pages = self.tree.num_pages(len(tokens))
        check_pages_final(request.request_id, num_pages, committed_len, self.tree.page_size)
        result = self.tree.insert(tokens, request.pages, salt, adapter)
        self.allocator.share(result.added)
        return result
