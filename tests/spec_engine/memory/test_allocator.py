"""Pages are handed out once, taken back once, and always add up."""

import pytest

from kvcanary.invariants import (
    DoubleFreeError,
    NullPageError,
    PageAliasError,
    PageLeakError,
    PoolExhaustedError,
    PoolSizeError,
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
    with pytest.raises(PageLeakError, match="1 pages free \\+ 1 owned by requests != 3"):
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
