"""Where rows lie: which slot an index array or a block table names at each place."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record.device import tl, triton

PAGE_LIMIT = 1 << 40  # ids beyond it, of either sign, have slot -1: times a page size they could wrap around
LIMIT = tl.constexpr(PAGE_LIMIT)


class PageTable(NamedTuple):
    """Block tables, of which row r has at place i

        slot = pages[r, i // page_size] * page_size + i % page_size

    pages:     [num_rows, width] int32 or int64, dense rows at any stride
    page_size: slots that one element of `pages` stands for
    """

    pages: Tensor
    page_size: int


def slot_at(table: PageTable, rows: Tensor, places: Tensor) -> Tensor:
    """[n] int64: the slots at these places of these rows, in the pool or not; -1 outside the table."""
    pages, page_size = table
    num_rows, width = pages.shape
    inside = (places >= 0) & (places < width * page_size) & (rows >= 0) & (rows < num_rows)
    found = torch.full_like(places, -PAGE_LIMIT)
    found[inside] = pages[rows[inside], places[inside] // page_size].to(torch.int64)
    named = (found > -PAGE_LIMIT) & (found < PAGE_LIMIT)
    return torch.where(named, found * page_size + places % page_size, -1)


def entry_at(indices: Tensor, places: Tensor) -> Tensor:
    """[n] int64: what an index array [nnz] int64 holds at these places; -1 outside of it."""
    if places.numel():
        low, high = torch.aminmax(places)
        if int(low) >= 0 and int(high) < indices.numel():
            return indices.index_select(0, places)
    inside = (places >= 0) & (places < indices.numel())
    found = torch.full_like(places, -1)
    found[inside] = indices[places[inside]]
    return found


def segment_entries(lengths: Tensor, n: int, *firsts: Tensor) -> Tensor:
    """[len(firsts), n] int64: each of `firsts` [segments], counted up through all n entries of its segment."""
    heads = lengths.cumsum(0).sub_(lengths)
    shifts = torch.repeat_interleave(torch.stack(firsts).sub_(heads), lengths, dim=1, output_size=n)
    return shifts.add_(torch.arange(n, device=shifts.device))


@triton.jit
def device_slot_at(row, places, m_n, width, PAGE: tl.constexpr):
    """slot_at in a row of `width` pages that begins at `row`; m_n: places of interest, the others are -1."""
    m_place = m_n & (places >= 0) & (places // PAGE < width)
    page = tl.load(row + places // PAGE, mask=m_place, other=-1).to(tl.int64)
    m_page = m_place & (page > -LIMIT) & (page < LIMIT)
    return tl.where(m_page, page * PAGE + places % PAGE, -1)


@triton.jit
def device_entry_at(indices, places, m_n, num_indices):
    """entry_at; m_n: places of interest, the others are -1."""
    return tl.load(indices + places, mask=m_n & (places >= 0) & (places < num_indices), other=-1)
