"""A row grows by what it lacks, counted in pages, whoever hands them out."""

import pytest
import torch

from kvcanary.invariants import PoolExhaustedError
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.extend import alloc_extend
from spec_engine.memory.pools.window_pool import WindowPool


def test_the_last_page_is_filled_before_new_ones():
    """Eight entries fit into the two pages that the row has, eleven need one more."""
    allocator = PageAllocator(8)
    row = alloc_extend(allocator, 0, 5, 4)
    assert row == [1, 2]
    assert alloc_extend(allocator, len(row), 8, 4) == []
    assert alloc_extend(allocator, len(row), 11, 4) == [3]


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_a_row_that_grows_owns_what_one_has_that_is_made_at_once(page_size):
    """Whatever the steps, and also where a length follows that is shorter."""
    allocator, row = PageAllocator(64), []
    for length in [1, 2, 5, 6, 3, 16, 17, 33]:
        row += alloc_extend(allocator, len(row), length, page_size)
    assert row == alloc_extend(PageAllocator(64), 0, 33, page_size)


def test_missing_room_is_counted_in_pages():
    """Three pages' worth of free slots inside other requests' pages are no page."""
    allocator = PageAllocator(4)
    for _ in range(3):
        alloc_extend(allocator, 0, 1, 4)
    with pytest.raises(PoolExhaustedError, match="2 pages needed, 1 of 4 free"):
        alloc_extend(allocator, 0, 5, 4)
    assert allocator.num_free == 1


def test_pages_of_both_pools_of_a_window_are_counted():
    """Two of the full pool are free, none of the window pool: a row cannot grow."""
    pool = WindowPool(PageAllocator(4), PageAllocator(2), window=4, page_size=4, device=torch.device("cpu"))
    assert alloc_extend(pool, 0, 8, 4) == [1, 2]
    with pytest.raises(PoolExhaustedError, match="1 window pages needed, 0 of 2 free"):
        alloc_extend(pool, 2, 9, 4)
    assert (pool.num_free, pool._full.num_free) == (0, 2)
