"""Growing a row by single tokens: first the rest of its last page, then whole new ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary.invariants import check_last_slot
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.sizing import pages_for


def alloc_extend(
    allocator: PageAllocator, last_slot: int, start: int, end: int, page_size: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Slots ``[end - start] int64`` for positions [start, end), and the pages that were taken for them.

    last_slot: slot of position start - 1, -1 for an empty row. What is missing is counted in whole pages, never in
    tokens: a pool of free slots in other requests' last pages is a full one. PageContinuityError where ``last_slot``
    does not end at ``start``, and the errors of ``PageAllocator.allocate``; nothing is taken then.
    """
    check_last_slot(last_slot, start, page_size)
    num_owned = pages_for(start, 0, page_size)
    pages = allocator.allocate(pages_for(end, 0, page_size) - num_owned)
    last_page = last_slot // page_size  # of a row that is empty or whose last page is full nothing is taken from it
    positions = torch.arange(start, end, device=device)
    owners = torch.tensor([last_page, *pages], device=device)
    return owners[positions // page_size - num_owned + 1] * page_size + positions % page_size, pages
