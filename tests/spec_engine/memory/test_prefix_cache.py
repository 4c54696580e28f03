"""Pages move between requests, tree and allocator, and every page is accounted for at each moment."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcanary.invariants import (
    DoubleFreeError,
    PageLeakError,
    ReferenceCountError,
    RowOwnershipError,
    StalePageError,
    WritablePageError,
)
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.prefix_cache import PrefixCache
from spec_engine.memory.cache.prefix_tree import Node, PrefixTree
from spec_engine.memory.request_table import RequestTable


@dataclass(eq=False)
class Holder:
    """A request, as far as its memory goes."""

    request_id: str = "req-0"
    row: int = 0
    pages: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    num_shared: int = 0
    node: Node | None = None


def make_cache(num_pages=16, page_size=4, bigram=True, quarantine=0, rows=4) -> PrefixCache:
    table = RequestTable(rows, num_pages * page_size, page_size, torch.device("cpu"))
    return PrefixCache(PageAllocator(num_pages, quarantine), PrefixTree(page_size, bigram), table)


def admit(cache: PrefixCache, tokens, num_pages: int, request_id: str = "req-0") -> Holder:
    """A request with the cached head of its tokens, grown to ``num_pages``."""
    request = Holder(request_id, cache.table.acquire())
    cache.acquire(request, tokens)
    grow(cache, request, num_pages)
    return request


def grow(cache: PrefixCache, request: Holder, num_pages: int) -> None:
    missing = max(0, num_pages - len(request.pages))
    cache.make_room(missing)
    pages = cache.allocator.allocate(missing)
    cache.table.append_pages(request.row, len(request.pages) * cache.table.page_size, pages)
    cache.table.flush()
    request.pages += pages
    request.generations += cache.allocator.generations_of(pages)


def close(cache: PrefixCache, *requests: Holder) -> None:
    cache.accounting(requests).check()
    cache.check_references(requests)


@pytest.mark.parametrize("held", ["shared", "own"])
def test_a_page_that_somebody_else_has_by_now_is_not_freed(held: str):
    """Freed by mistake and granted again, it is of a later grant than its first holder means: nothing is released."""
    cache = make_cache()
    if held == "shared":
        cache.retire(admit(cache, range(9), 3, "one"), range(9), 8)
    first = admit(cache, range(9), 3, "first")
    page = first.pages[0]
    assert first.num_shared == 2 * (held == "shared")
    while page in cache.allocator.references:
        cache.allocator.free([page])
    second = admit(cache, range(50, 59), 1, "second")
    assert second.pages == [page]
    with pytest.raises(DoubleFreeError, match=rf"\[{page}\] were freed since"):
        cache.release(first)
    assert cache.allocator.references[page] == 1
    assert len(first.pages) == 3


def test_a_finished_request_leaves_its_whole_pages_to_the_tree():
    """Nine tokens in ten pages of four: eight bigrams are two cached pages, the other eight pages are free."""
    cache = make_cache()
    tokens = list(range(9))
    request = admit(cache, tokens, 10)
    pages = request.pages
    result = cache.retire(request, tokens, committed_len=9)
    assert (result.added, cache.tree.num_evictable, cache.allocator.num_free) == (pages[:2], 2, 14)
    assert (request.row, request.pages, len(cache.table._free_rows)) == (0, [], 4)
    close(cache)


def test_a_cached_prefix_is_the_head_of_a_row():
    """The second request reads the pages of the first, and forwards only what follows."""
    cache = make_cache()
    cache.retire(admit(cache, [5] * 9, 3), [5] * 9, committed_len=9)
    request = Holder("req-1", cache.table.acquire())
    assert cache.acquire(request, [5] * 9) == 8
    assert (request.pages, request.num_shared) == ([1, 2], 2)
    cache.table.flush()
    assert cache.table.table[request.row, :8].tolist() == list(range(4, 12))
    assert cache.accounting([request]).protected == 2
    close(cache, request)


@pytest.mark.parametrize("bigram", [True, False])
def test_one_token_is_left_to_forward(bigram):
    """A prompt that is cached whole would yield no logits: its last page is computed again."""
    cache = make_cache(bigram=bigram)
    cache.retire(admit(cache, [5] * 9, 3), [5] * 9, committed_len=9)
    assert cache.acquire(Holder("req-1", cache.table.acquire()), [5] * 8) == 4


def test_a_request_that_goes_on_takes_the_tree_s_pages_for_its_duplicates():
    """Two requests compute the same prompt at once: the second gives its copy back and reads the first's."""
    cache = make_cache()
    tokens = [5] * 9
    first, second = admit(cache, tokens, 4, "req-0"), admit(cache, tokens, 4, "req-1")
    assert cache.publish(first, tokens, committed_len=9).added == [1, 2]
    result = cache.publish(second, tokens, committed_len=9)
    assert (result.added, result.duplicates) == ([], [5, 6])
    assert (second.pages, second.num_shared) == ([1, 2, 7, 8], 2)
    cache.table.flush()
    assert cache.table.table[second.row, :12].tolist() == [*range(4, 12), *range(28, 32)]
    assert cache.allocator.references[1] == 3
    close(cache, first, second)
    cache.release(first)
    assert cache.make_room(16) == []  # the second still locks them
    cache.release(second)
    assert cache.make_room(16) == [2, 1]
    close(cache)


def test_publishing_again_moves_the_lock_along():
    """Each chunk of a prompt that is published protects what came before, once."""
    cache = make_cache()
    tokens = list(range(20))
    request = admit(cache, tokens, 6)
    for length in (5, 9, 9, 17):
        cache.publish(request, tokens[:length], committed_len=length)
        assert cache.tree.num_protected == request.num_shared == length // 4
        close(cache, request)
    cache.release(request)
    assert cache.tree.num_protected == 0


def test_a_page_that_may_still_be_written_is_not_published():
    """Branches and verify windows begin at the committed length; a page that reaches beyond it stays private."""
    cache = make_cache(bigram=False)
    request = admit(cache, [5] * 12, 4)
    with pytest.raises(WritablePageError, match="req-0 publishes 3 pages of 4 slots, it has committed 11"):
        cache.publish(request, [5] * 12, committed_len=11)
    with pytest.raises(WritablePageError):
        cache.retire(request, [5] * 12, committed_len=11)
    assert cache.tree.num_cached == 0
    close(cache, request)


def test_a_tree_that_points_at_a_free_page_is_found_before_it_is_read():
    """A reference given back twice frees the tree's page; the next hit of it is refused."""
    cache = make_cache()
    request = admit(cache, [5] * 9, 3)
    cache.retire(request, [5] * 9, committed_len=9)
    cache.allocator.free([2])
    with pytest.raises(StalePageError, match=r"pages \[1, 2\] shared, but \[2\] are free"):
        cache.acquire(Holder("req-1", cache.table.acquire()), [5] * 9)
    with pytest.raises(ReferenceCountError, match="references of page 2 are 0, rows and prefix tree name it 1 times"):
        cache.check_references([])
    with pytest.raises(PageLeakError, match=r"15 pages free .* 2 evictable .* 1 counted twice"):
        cache.accounting([]).check()


def test_a_retracted_request_gives_everything_back_and_caches_nothing():
    """Its shared head stays in the tree, its private tail is free, and a second release is refused."""
    cache = make_cache()
    cache.retire(admit(cache, [5] * 9, 3), [5] * 9, committed_len=9)
    request = admit(cache, [5] * 9, 6)
    row = request.row
    cache.release(request)
    assert (cache.allocator.num_free, cache.tree.num_evictable) == (14, 2)
    close(cache)
    request.row = row
    with pytest.raises(RowOwnershipError):
        cache.release(request)


def test_a_retraction_is_planned_with_what_it_gives_back():
    """One of two that share two pages gives back its tail only; both together give back all."""
    cache = make_cache()
    cache.retire(admit(cache, [5] * 9, 3), [5] * 9, committed_len=9)
    first, second = admit(cache, [5] * 9, 6, "req-1"), admit(cache, [5] * 9, 3, "req-2")
    assert cache.num_available == 9
    assert cache.num_released_by([first]) == 4
    assert cache.num_released_by([second]) == 1
    assert cache.num_released_by([first, second]) == 7


def test_make_room_evicts_only_what_is_missing():
    """Free pages come first, those in quarantine included: they only have to wait."""
    cache = make_cache(num_pages=4, quarantine=5)
    cache.retire(admit(cache, [5] * 9, 3), [5] * 9, committed_len=9)
    assert (cache.num_available, cache.allocator.num_quarantined) == (4, 1)
    assert cache.make_room(2) == []
    assert cache.make_room(3) == [2]
    assert (cache.num_available, cache.allocator.num_ready) == (4, 1)
    cache.allocator.begin_step(1)
    assert cache.allocator.allocate(3) == [2, 3, 4]
    assert cache.allocator.references[1] == 1


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class AnyOrder(RuleBasedStateMachine):
    """Requests come, grow, publish and go in any order; bytes are stood for by the tokens last written to a page."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(num_pages=12, page_size=2, quarantine=2, rows=3)
        self.live: dict[Holder, list[int]] = {}
        self.bytes: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end and the next
        self.step = 0

    @precondition(lambda self: len(self.live) < 3)
    @rule(tokens=TOKENS)
    def admit(self, tokens) -> None:
        cache = self.cache
        need = -(-len(tokens) // 2)
        request = Holder(f"req-{self.step}", cache.table.acquire())
        cached = cache.acquire(request, tokens)
        cache.make_room(need - len(request.pages))
        for i, page in enumerate(request.pages):
            assert self.bytes[page] == tuple(tokens[: 2 * i + 3])
        assert cached < len(tokens)
        if need - len(request.pages) > cache.allocator.num_ready:
            cache.release(request)
            return
        grow(cache, request, need)
        self.live[request] = tokens
        self.write(request)

    def write(self, request) -> None:
        for i, page in enumerate(request.pages[request.num_shared :], request.num_shared):
            self.bytes[page] = tuple(self.live[request][: 2 * i + 3])

    def some(self, data) -> Holder:
        return data.draw(st.sampled_from(sorted(self.live, key=lambda request: request.row)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), by=st.integers(1, 4))
    def extend(self, data, by) -> None:
        request = self.some(data)
        tokens = self.live[request] + [1] * by
        missing = -(-len(tokens) // 2) - len(request.pages)
        self.cache.make_room(missing)
        if len(tokens) <= 20 and missing <= self.cache.allocator.num_ready:
            grow(self.cache, request, len(request.pages) + missing)
            self.live[request] = tokens
            self.write(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data) -> None:
        request = self.some(data)
        self.cache.publish(request, self.live[request], len(self.live[request]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def retire(self, data) -> None:
        request = self.some(data)
        tokens = self.live.pop(request)
        self.cache.retire(request, tokens, len(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data) -> None:
        request = self.some(data)
        del self.live[request]
        expected = self.cache.num_available + self.cache.num_released_by([request])
        self.cache.release(request)
        assert self.cache.num_available == expected

    @rule()
    def begin_step(self) -> None:
        self.step += 1
        self.cache.allocator.begin_step(self.step)

    @invariant()
    def closes(self) -> None:
        close(self.cache, *self.live)

    @invariant()
    def rows_read_their_own_tokens(self) -> None:
        self.cache.table.flush()
        for request, tokens in self.live.items():
            slots = self.cache.table.table[request.row, : 2 * len(request.pages)].tolist()
            assert slots == [2 * page + offset for page in request.pages for offset in (0, 1)]
            for i, page in enumerate(request.pages[: (len(tokens) - 1) // 2]):
                assert self.bytes[page] == tuple(tokens[: 2 * i + 3])

    def teardown(self) -> None:
        assert self.cache.num_available + self.cache.num_released_by(list(self.live)) == 12
        for request in list(self.live):
            self.cache.release(request)
        self.cache.make_room(12)
        assert self.cache.allocator.num_free == 12
        close(self.cache)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.__doc__ = "After any history every page is accounted for, and every row reads what was written for it."
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestAnyOrderForLong(AnyOrder.TestCase):
    """The same, many more times."""

    settings = settings(max_examples=2000, stateful_step_count=40, deadline=None)
