"""Pages are handed out once, taken back once, and always add up."""

import pytest

from kvcanary.invariants import (
    DoubleFreeError,
    NullPageError,
    PageAliasError,
    PageLeakError,
    PagesQuarantinedError,
    PoolExhaustedError,
    PoolSizeError,
    StalePageError,
)
from spec_engine.memory.allocator import PageAllocator


def test_allocate_hands_out_the_lowest_pages_and_never_page_zero():
    """Page 0 is the null page; freed pages come back in order."""
    allocator = PageAllocator(4)
    assert allocator.allocate(3) == [1, 2, 3]
    allocator.free([2])
    assert allocator.allocate(2) == [2, 4]


def test_allocate_beyond_the_pool_takes_nothing():
    """Too large a request names what was needed and what there was, and leaves the free list alone."""
    allocator = PageAllocator(3)
    allocator.allocate(1)
    with pytest.raises(PoolExhaustedError, match="3 pages needed, 2 of 3 free: raise max_total_tokens"):
        allocator.allocate(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize("pages", [[2], [1, 1], [0], [9]])
def test_free_refuses_pages_that_are_not_taken(pages):
    """A page freed twice, twice in one call, or never handed out is a double free, and frees nothing."""
    allocator = PageAllocator(3)
    allocator.allocate(1)
    with pytest.raises(DoubleFreeError, match="not allocated"):
        allocator.free(pages)
    assert allocator.num_free == 2


def test_check_accounting_sees_a_page_that_nobody_owns():
    """Free plus owned must be the whole pool."""
    allocator = PageAllocator(3)
    allocator.allocate(2)
    allocator.check_accounting(owned=2)
    with pytest.raises(PageLeakError, match=r"1 pages free .* 1 owned by requests .* = 2 != 3 in all: 1 leaked"):
        allocator.check_accounting(owned=1)


@pytest.mark.parametrize(
    ("free", "error", "words"),
    [
        ([1, 3], PageAliasError, r"page 1 handed out with \[1\], but it is one of 1 taken"),
        ([0, 3], NullPageError, r"page 0 handed out with \[0\]"),
        ([7, 9], PoolSizeError, r"page 7 handed out with \[7\], the pool has pages 1 to 3"),
    ],
)
def test_allocate_refuses_a_page_that_is_not_its_own_to_give(free, error, words):
    """A free list that holds a taken page, the null page or one beyond the pool is found before anyone writes there."""
    allocator = PageAllocator(3)
    allocator.allocate(1)
    allocator._free = free
    with pytest.raises(error, match=words):
        allocator.allocate(1)


def test_freed_pages_wait_in_quarantine_and_count_as_free():
    """A page is handed out again only after the quarantine, while the accounting goes on closing."""
    allocator = PageAllocator(4, quarantine=3)
    allocator.begin_step(1)
    assert allocator.allocate(2) == [1, 2]
    allocator.free([1])
    assert (allocator.num_free, allocator.num_quarantined) == (3, 1)
    allocator.check_accounting(owned=1)
    allocator.begin_step(3)
    assert allocator.allocate(1) == [3]
    allocator.begin_step(4)
    assert allocator.num_quarantined == 0
    assert allocator.allocate(1) == [1]


def test_under_pressure_the_quarantine_gives_its_oldest_pages():
    """Nobody waits for memory because of the quarantine."""
    allocator = PageAllocator(3, quarantine=100)
    allocator.allocate(3)
    allocator.free([2])
    allocator.begin_step(1)
    allocator.free([1])
    allocator.begin_step(2)
    assert allocator.allocate(1) == [2]
    with pytest.raises(PoolExhaustedError, match="2 pages needed, 1 of 3 free"):
        allocator.allocate(2)


def test_under_pressure_the_pages_of_this_step_wait_for_the_next():
    """A forward in flight may still touch a page that was just freed: the caller is told to wait, and gets it then."""
    allocator = PageAllocator(3, quarantine=100)
    allocator.begin_step(7)
    allocator.free(allocator.allocate(2))
    assert (allocator.num_free, allocator.num_ready) == (3, 1)
    with pytest.raises(PagesQuarantinedError, match="2 pages needed, 1 ready and 2 more in quarantine since this step"):
        allocator.allocate(2)
    assert allocator.allocate(1) == [3]
    allocator.begin_step(8)
    assert allocator.num_ready == 2
    assert allocator.allocate(2) == [1, 2]


def test_the_quarantine_gives_no_more_than_is_missing():
    """Pages that nobody needs yet go on waiting."""
    allocator = PageAllocator(4, quarantine=100)
    allocator.free(allocator.allocate(3))
    allocator.begin_step(1)
    assert allocator.allocate(2) == [1, 4]
    assert allocator.num_quarantined == 2


def test_a_page_is_free_when_its_last_holder_has_given_it_back():
    """Shared pages have a count; a free beyond it is a double free."""
    allocator = PageAllocator(2)
    pages = allocator.allocate(2)
    allocator.share([1])
    assert dict(allocator.references) == {1: 2, 2: 1}
    allocator.free(pages)
    assert (allocator.num_free, dict(allocator.references)) == (1, {1: 1})
    allocator.free([1])
    with pytest.raises(DoubleFreeError, match=r"pages \[1\] freed, but \[1\] not allocated"):
        allocator.free([1])
    assert allocator.allocate(2) == [1, 2]


def test_a_free_page_is_not_shared():
    """Who shares a page that nobody holds reads whatever its next owner writes; nothing is shared then."""
    allocator = PageAllocator(2)
    allocator.allocate(1)
    with pytest.raises(StalePageError, match=r"pages \[1, 2\] shared, but \[2\] are free"):
        allocator.share([1, 2])
    assert dict(allocator.references) == {1: 1}


def test_generations_grow_when_a_page_is_granted_and_when_it_is_free():
    """One holder of two that leaves changes nothing."""
    allocator = PageAllocator(2)
    assert allocator.generations_of([1, 2]) == [0, 0]
    allocator.allocate(1)
    allocator.share([1])
    allocator.free([1])
    assert allocator.generations_of([1, 2]) == [1, 0]
    allocator.free([1])
    assert allocator.generations_of([1, 2]) == [2, 0]
    allocator.allocate(2)
    assert allocator.generations_of([1, 2]) == [3, 1]


def test_a_page_that_was_freed_is_told_though_it_is_taken_again():
    """The generation of the grant that is meant tells a holder of before from the new owner's page."""
    allocator = PageAllocator(1)
    pages = allocator.allocate(1)
    granted = allocator.generations_of(pages)
    allocator.check_granted(pages, granted)
    allocator.free(pages)
    assert allocator.allocate(1) == pages
    with pytest.raises(DoubleFreeError, match=r"\[1\] were freed since: generations are \[3\]"):
        allocator.check_granted(pages, granted)
