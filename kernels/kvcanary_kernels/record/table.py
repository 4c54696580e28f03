"""PageTable: which slot each entry of a segment is; an index array is the table of one row and pages of one slot."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import tl, triton

PAGE_LIMIT = 1 << 40  # ids beyond it, of either sign, have slot -1: times a page size they could wrap around
MAX_PAGE_SIZE = 1 << 22
LIMIT = tl.constexpr(PAGE_LIMIT)


@dataclass(frozen=True, eq=False)
class PageTable:
    """The table that attention reads. Entry j of segment s lies at place i = starts[s] + j of its row, and is

        slot = pages[rows[s], i // page_size] * page_size + i % page_size

    pages:       [num_rows, width] int32 or int64, dense rows at any stride
    page_size:   slots that one element of `pages` stands for
    rows:        [segments] int64; None: every segment lies in row 0
    code_starts: [segments] int64, where the codes of each segment lie; None: at its starts
    Flat page ids with an indptr are one row: starts[s] = indptr[s] * page_size + first.
    """

    pages: Tensor
    page_size: int
    rows: Tensor | None = None
    code_starts: Tensor | None = None


def as_table(indices: Tensor | PageTable) -> PageTable:
    """A flat array of slots as the table that it is."""
    return indices if isinstance(indices, PageTable) else PageTable(indices[None], page_size=1)


def element_at(values: Tensor, page_size: int, rows: Tensor | None, places: Tensor, outside: int = -1) -> Tensor:
    """[n] int64: what `values` (of the shape of a table's pages) hold for these places of these rows."""
    num_rows, width = values.shape
    if rows is None and num_rows and _all_below(places, width * page_size):
        return values[0].index_select(0, places if page_size == 1 else places // page_size).to(torch.int64)
    inside = (places >= 0) & (places < width * page_size)
    if rows is not None:
        inside &= (rows >= 0) & (rows < num_rows)
    found = torch.full_like(places, outside)
    row = 0 if rows is None else rows[inside]
    found[inside] = values[row, places[inside] // page_size].to(torch.int64)
    return found


def slot_at(table: PageTable, rows: Tensor | None, places: Tensor) -> Tensor:
    """[n] int64: the slots at these places of these rows, in the pool or not; -1 outside the table."""
    if table.page_size == 1:
        return element_at(table.pages, 1, rows, places)
    pages = element_at(table.pages, table.page_size, rows, places, outside=-PAGE_LIMIT)
    named = (pages > -PAGE_LIMIT) & (pages < PAGE_LIMIT)
    return torch.where(named, pages * table.page_size + places % table.page_size, -1)


def segment_entries(lengths: Tensor, n: int, *firsts: Tensor) -> Tensor:
    """[len(firsts), n] int64: each of `firsts` [segments], counted up through all n entries of its segment."""
    heads = lengths.cumsum(0).sub_(lengths)
    shifts = torch.repeat_interleave(torch.stack(firsts).sub_(heads), lengths, dim=1, output_size=n)
    return shifts.add_(torch.arange(n, device=shifts.device))


def _all_below(places: Tensor, limit: int) -> bool:
    """Whether places lie in [0, limit)."""
    if not places.numel():
        return True
    low, high = torch.aminmax(places)
    return int(low) >= 0 and int(high) < limit


@triton.jit
def device_slot_at(row, places, m_n, width, PAGE: tl.constexpr):
    """slot_at in a row of `width` pages that begins at `row`; m_n: places of interest, the others are -1."""
    m_place = m_n & (places >= 0) & (places // PAGE < width)
    page = tl.load(row + places // PAGE, mask=m_place, other=-1).to(tl.int64)
    if PAGE > 1:
        m_page = m_place & (page > -LIMIT) & (page < LIMIT)
        page = tl.where(m_page, page * PAGE + places % PAGE, -1)
    return page


def expect_table(table: PageTable, num_segments: int) -> None:
    pages = table.pages
    dense = pages.dim() == 2 and (pages.shape[1] <= 1 or pages.stride(1) == 1)
    if not dense or pages.dtype not in (torch.int32, torch.int64):
        shape = f"{list(pages.shape)} {pages.dtype}"
        raise ValueError(f"pages must be [rows, width] int32 or int64 with dense rows, got {shape}")
    if not 0 < table.page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size of the table must be 1 to {MAX_PAGE_SIZE}, got {table.page_size}")
    expect_int64(num_segments, rows=table.rows, code_starts=table.code_starts)
