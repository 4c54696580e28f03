"""The KV memory of one engine: pages, rows and the prefix cache at work, and what the canary is told of their lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcanary.faults import seam
from kvcanary.invariants import check_estimate, check_lengths
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.host_tier import HostBlock, HostTier
from spec_engine.memory.cache.prefix_cache import PrefixCache
from spec_engine.memory.cache.prefix_tree import PrefixTree
from spec_engine.memory.extend import alloc_extend
from spec_engine.memory.pools.split_pool import SplitPool, SplitRow
from spec_engine.memory.pools.window_pool import WindowPool, WindowRow
from spec_engine.memory.request_table import RequestTable
from spec_engine.memory.sizing import pages_for, step_pages, window_row_pages
from spec_engine.request import Request

if TYPE_CHECKING:
    from kvcanary import CanaryManager


PREFILL = "prefill"


class KVMemory:
    """Gives requests rows and pages and takes them back; every change is told to the canary.

    defers: whether admissions and grants of a step may be told, and a row be written, when its first forward is opened,
            and the device has something to compute meanwhile; before anything else is told, and in their order
    """

    def __init__(
        self,
        allocator: PageAllocator | WindowPool,
        table: RequestTable,
        canary: CanaryManager | None,
        *,
        is_drafting: bool,
        caches_prefixes: bool,
        tier: HostTier | None = None,
        has_states: bool = False,
    ) -> None:
        """``tier``: where what retracted requests had computed is put away; None: it is computed again.

        has_states: of rows, which a canary judges before it opens a forward
        """
        self.allocator, self.table, self.tier = allocator, table, tier
        self._canary = canary
        self._unreported: deque[Callable[[], None]] = deque()
        self._granted: list[tuple[str, list[int]]] | None = None  # that are told together; None: each is told by itself
        self.windows = allocator if isinstance(allocator, WindowPool) else None
        self.split = allocator if isinstance(allocator, SplitPool) else None
        waits = self.windows is not None or self.split is not None or tier is not None or has_states
        self.defers = table.table.is_cuda and not waits
        self.caches_prefixes = caches_prefixes
        self.page_size = table.page_size
        self.cache = PrefixCache(allocator, PrefixTree(table.page_size, bigram=is_drafting), table)

    @property
    def num_free_places(self) -> int:
        """Pages of the host tier that hold nothing."""
        return 0 if self.tier is None else self.tier.num_free

    @property
    def canary(self) -> CanaryManager | None:
        """To be told something else: it knows all that came before."""
        self.report()
        return self._canary

    def report(self) -> None:
        """What waits to be told is told now."""
        if self._granted:
            self._report_granted()
        while self._unreported:
            self._unreported.popleft()()

    def before_open(self) -> None:
        """A forward is about to read its rows and the canary to judge them: nothing waits any more."""
        self.report()
        self.table.flush()

    @property
    def num_available(self) -> int:
        """Pages that could be granted: free, waiting in quarantine, or cached and used by nobody."""
        return self.cache.num_available

    def can_hold(self, expected: Sequence[tuple[Request, int]], reserve: int) -> bool:
        """Whether requests could own so many pages each; of a window pool they need no more than their rows hold."""
        missing = sum(count - len(request.pages) for request, count in expected)
        if self.windows is None:
            return missing <= self.num_available
        most = window_row_pages(self.windows.window, reserve, self.page_size)
        in_windows = sum(
            max(0, min(count, most) - self.windows.num_held(request.request_id, request.pages))
            for request, count in expected
        )
        tree = self.cache.tree
        return self.windows.can_grant(missing, in_windows, tree.evictable_pages())

    def admit(self, request: Request, running: Iterable[Request] = ()) -> None:
        """Take a row for a request and begin it with what is cached of its tokens, by now or by the ``running``."""
        request.begin()
        request.row = self.table.acquire()
        if self._canary is not None:
            known = request.numbers(0, request.num_tokens)
            self._reporter(self._canary.admit)(request.request_id, known, request.salt, request.adapter)
        if self.caches_prefixes:
            self._acquire(request, request.tokens[: request.prefill_len], running)
        if request.block is not None and request.block.length <= request.committed_len:
            self.drop_block(request)
        if self.windows is not None:
            self.windows.start(request.request_id, request.committed_len)

    def slide(self, requests: Iterable[Request]) -> None:
        """Give back the window pages of positions that no forward sees any more.

        What can be seen from the end of the last whole page stays, so that a request can go on from there if the page
        is cached.
        """
        if self.windows is not None:
            for request in requests:
                row = _window_row(request)
                self.windows.slide(row._replace(committed_len=row.committed_len // self.page_size * self.page_size))

    def grow(self, request: Request, end: int, reserve: int, most: int) -> int:
        """Own the pages of row positions [0, end + reserve); how many were taken for it.

        ``most``: what admission counted with.
        """
        missing = step_pages(end, len(request.pages), reserve, self.page_size)
        if missing:
            self.make_room(missing)
            if request.block is not None:
                self._extend(request, len(request.block.places) * self.page_size, for_load=True)
            self._extend(request, end + reserve)
        taken, name = len(request.pages), request.request_id
        check_estimate(name, taken, end, reserve, self.page_size, most)
        check_lengths(name, end, taken * self.page_size, self.table.width)
        if self.windows is not None:
            self.windows.check_mapped(_window_row(request))
        return missing

    def grow_all(self, requests: Iterable[Request], reserve: int, most: Callable[[Request], int]) -> int:
        """`grow` by a decode step of all of these; how many pages were taken.

        What they were granted is told in one call, here or before anything else is told. A pool of several tells of its
        own pages as it hands them out: each grant follows by itself.
        """
        self._granted = [] if self.windows is None and self.split is None else None
        try:
            return sum(self.grow(own, own.committed_len, reserve, most(own)) for own in requests)
        finally:
            self._report_granted()
            self._granted = None

    def bring(self, what: str, requests: Sequence[Request]) -> None:
        """Have on the device what the next forward, ``what``, of these requests reads and writes.

        A prefill on a GPU has some of it when it is opened (`before_open`).
        """
        is_late = self.defers and what == PREFILL  # a decode step may be one program, in which nothing is opened
        if not is_late:
            self.report()
        if not is_late or len(requests) > 1:  # the indices of one row are the table's own, those of several are copied
            self.table.flush()
        if self.split is not None:
            self.split.bring(what, [SplitRow(r.request_id, r.pages, r.committed_len) for r in requests])

    def make_room(self, count: int) -> bool:
        """Let cached pages go until ``count`` are free; whether so many can be granted in this very step."""
        evicted = self.cache.make_room(count)
        if evicted and self.canary is not None:
            self.canary.on_evict(evicted)
        return count <= self.allocator.num_ready

    def drop_damaged(self) -> None:
        """Nobody begins with pages in which the canary has found damage, nor with what was computed from them."""
        if self.canary is None or not (damaged := self.canary.damaged_pages):
            return
        if dropped := self.cache.drop(damaged):
            self.canary.on_evict(dropped)

    def release(self, request: Request, publish: bool) -> bool:
        """Take everything back; whether its bytes were to the end what had been written.

        ``publish``: the prefix cache keeps the whole pages of what is committed.
        """
        self.drop_block(request)
        name, pages = request.request_id, request.pages
        own = request.committed_len if publish else None  # the host may count what was refused to a corrupted one
        is_intact = self.canary is None or self.canary.release(name, own)
        if publish and is_intact and self.caches_prefixes:
            result = self.cache.retire(request, *self._final(request), *request.root)
            self._report_shared(name, result.added)
        else:
            self.cache.release(request)
        if self.windows is not None:
            self.windows.forget(name)
        if self.canary is not None:
            self.canary.on_free(name, pages)
        return is_intact

    def check_accounting(self, requests: Iterable[Request]) -> None:
        """PageLeakError unless every page is free, waits, or is held by a request or the cache."""
        self.report()
        self.cache.check_accounting(requests)
        if self.tier is not None:
            self.tier.check_accounting()

    # what retracted requests had computed

    def retract(self, request: Request) -> None:
        """Take everything back of a request that is to go on later; what it has computed goes to the host, if it fits.

        Where the canary found its bytes changed they are not kept, and computed again.
        """
        block, request.block = self._put_away(request), None
        is_intact = self.release(request, publish=False)
        request.block = block
        if not is_intact:
            self.drop_block(request)

    def expects_block(self, request: Request) -> bool:
        """Whether it waits for what is on the host; a block that was evicted for others is forgotten."""
        if request.block is not None and not (self.tier and self.tier.holds(request.block)):
            request.block = None
        return request.block is not None

    def restore(self, request: Request) -> None:
        """Bring back what was put away into the request's own pages, and with it [0, its length) of the row.

        LoadFailedError where it did not arrive: the pages hold nothing.
        """
        tier, block = self.tier, request.block
        if tier is None or block is None:
            return
        name, first = request.request_id, request.num_shared
        load = tier.restore(block, name, request.pages[first : len(block.places)], first)
        tier.finish(load)
        if self.canary is not None:
            self.canary.commit(name, block.length)
        request.committed_len = request.cached_len = block.length
        self.drop_block(request)

    def drop_block(self, request: Request) -> None:
        """Nobody needs what was put away of the request."""
        if request.block is not None:
            self.drop(request.block)
        request.block = None

    def hand_over(self, request: Request) -> HostBlock | None:
        """`put_away` for another engine: it is evicted for nobody until it is dropped."""
        block = self._put_away(request)
        if block is not None and self.tier is not None:
            self.tier.pin(block)
        return block

    def drop(self, block: HostBlock) -> None:
        """Nobody comes for it any more, if it is still there."""
        if self.tier is not None and self.tier.holds(block):
            self.tier.drop(block)

    def _put_away(self, request: Request) -> HostBlock | None:
        """What it has computed on the host, in a block of the tier, None where it does not fit.

        The last known token stays to be forwarded: a draft proposes from it.
        """
        if self.tier is None:
            return None
        if self.expects_block(request):  # it has not come back yet
            return request.block
        length = min(request.committed_len, request.known_len - 1)
        count = pages_for(length, 0, self.page_size)
        if not 1 <= count <= self.tier.num_obtainable:
            return None
        block = self.tier.offload(request.pages[:count], length)
        self.tier.wait(block)
        return block

    def _extend(self, request: Request, length: int, for_load: bool = False) -> None:
        """The row holds ``length`` entries from now on; ``for_load``: bytes come into its new pages from the host."""
        pages = alloc_extend(self.allocator, len(request.pages), length, self.page_size)
        if not pages:
            return
        self.table.append_pages(request.row, len(request.pages) * self.page_size, pages)
        kept = seam("lengths.watermark_not_raised", pages, num_held=len(request.pages))
        request.pages += kept
        request.generations += self.allocator.generations_of(kept)
        if self._canary is None:
            return
        if self._granted is None or for_load:
            self._report_granted()
            self._reporter(self._canary.on_alloc)(request.request_id, pages, for_load)
        else:
            self._granted.append((request.request_id, pages))

    def _report_granted(self) -> None:
        """What rows were granted together."""
        if not self._granted or self._canary is None:
            return
        names, pages = zip(*self._granted, strict=True)
        self._granted.clear()
        self._reporter(self._canary.on_alloc_all)(names, pages)

    def _reporter(self, event: Callable[..., None]) -> Callable[..., None]:
        """Tells of it, or keeps it until it may be told; where nothing is kept, histories have the caller's line."""
        return (lambda *facts: self._unreported.append(partial(event, *facts))) if self.defers else event

    # sharing what running requests have

    def _acquire(self, request: Request, known: list[int], running: Iterable[Request]) -> None:
        request.root = request.salt, request.adapter
        for other in running:
            if other is not request and self.windows is None and self._helps(other, request, known):
                self._publish(other)  # a window pool keeps no pages that other rows gave up for their equals
        request.root = seam("identity.weak_key", request.root, tree=self.cache.tree, tokens=known)
        request.committed_len = request.cached_len = self.cache.acquire(request, known, *request.root)
        if request.pages and self.canary is not None:
            self.canary.on_acquire(request.request_id, request.pages)

    def _helps(self, other: Request, request: Request, known: Sequence[int]) -> bool:
        """Whether a running request has more whole pages of these tokens than the cache.

        One that is admitted in the same step, but later, has none yet, whatever its lengths were before.
        """
        if other.root != request.root or not other.pages or not other.is_prefilled:
            return False
        tree = self.cache.tree
        cached_len = tree.match(known, *request.root).num_tokens
        return tree.num_pages(_common(other.tokens, known)) * self.page_size > cached_len

    def _publish(self, request: Request) -> None:
        """Cache the whole pages of what a running request has committed; it reads the cache's where there were some."""
        before = list(request.pages)
        result = self.cache.publish(request, *self._final(request), *request.root)
        self._report_shared(request.request_id, result.added)
        if self.canary is not None:
            for page, kept in zip(before, request.pages, strict=True):
                if page != kept:
                    self.canary.on_deduplicate(request.request_id, page, kept)

    def _final(self, request: Request) -> tuple[list[int], int]:
        """The tokens that committed pages are found by, and the committed length."""
        return request.tokens[: request.committed_len + self.cache.tree.bigram], request.committed_len

    def _report_shared(self, name: str, pages: list[int]) -> None:
        if pages and self.canary is not None:
            self.canary.on_share(name, pages)


def _window_row(request: Request) -> WindowRow:
    return WindowRow(request.request_id, request.pages, request.committed_len)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens in which two lists begin alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
