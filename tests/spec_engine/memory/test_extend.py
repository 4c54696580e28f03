"""Growing by tokens fills the last page first, and counts what is missing in pages."""

import pytest
import torch

from kvcanary.invariants import PageContinuityError, PoolExhaustedError
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.extend import alloc_extend

CPU = torch.device("cpu")


def test_the_last_page_is_filled_before_new_ones():
    """Two tokens in page 0's place, nine more: two slots of the old page, then pages 3 and 4."""
    allocator = PageAllocator(8)
    allocator.allocate(2)
    slots, pages = alloc_extend(allocator, 1, 2, 11, 4, CPU)
    assert slots.tolist() == [2, 3, 12, 13, 14, 15, 16, 17, 18]
    assert slots.dtype == torch.int64
    assert pages == [3, 4]


def test_an_empty_row_and_a_full_page_begin_with_a_new_page():
    """Nothing is written behind the last slot of a full page."""
    allocator = PageAllocator(8)
    assert alloc_extend(allocator, -1, 0, 4, 4, CPU)[0].tolist() == [4, 5, 6, 7]
    assert alloc_extend(allocator, 7, 4, 6, 4, CPU)[0].tolist() == [8, 9]
    slots, pages = alloc_extend(allocator, 9, 6, 8, 4, CPU)
    assert (slots.tolist(), pages) == ([10, 11], [])
    slots, pages = alloc_extend(allocator, 11, 8, 8, 4, CPU)
    assert (slots.tolist(), pages) == ([], [])


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_slots_of_a_row_that_grows_are_those_of_one_that_is_made_at_once(page_size):
    """Whatever the steps, the row's slots are distinct, off the null page, and its pages in row order."""
    allocator, lens = PageAllocator(64), [1, 2, 5, 6, 16, 17, 33]
    row, pages, start = [], [], 0
    for end in lens:
        last = row[-1] if row else -1
        slots, taken = alloc_extend(allocator, last, start, end, page_size, CPU)
        row, pages, start = row + slots.tolist(), pages + taken, end
    assert row == [pages[p // page_size] * page_size + p % page_size for p in range(33)]


def test_missing_room_is_counted_in_pages():
    """Three pages' worth of free slots inside other requests' pages are no page."""
    allocator = PageAllocator(4)
    for _ in range(3):
        alloc_extend(allocator, -1, 0, 1, 4, CPU)
    with pytest.raises(PoolExhaustedError, match="2 pages needed, 1 of 4 free"):
        alloc_extend(allocator, -1, 0, 5, 4, CPU)
    assert allocator.num_free == 1


def test_a_last_slot_of_another_length_is_refused():
    """The slot at the committed length is not where an allocation that goes further ends; nothing is taken."""
    allocator = PageAllocator(4)
    with pytest.raises(PageContinuityError, match="length 9 ends at offset 1 of a page of 4, its last slot 6 at 3"):
        alloc_extend(allocator, 6, 9, 12, 4, CPU)
    assert allocator.num_free == 4
