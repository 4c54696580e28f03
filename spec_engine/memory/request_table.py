"""The request table: for each running request, the slot of every position. Row 0 is for padding, always zero."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.invariants import (
    check_flat_indices,
    check_row_continues,
    check_row_covers,
    check_row_fits,
    check_row_held,
    check_rows_available,
)
from spec_engine.step.transfer import to_device


class RequestTable:
    """``table [rows + 1, width] int64``: ``table[row, p]`` is the slot of logical position p."""

    def __init__(self, num_rows: int, width: int, page_size: int, device: torch.device) -> None:
        check_flat_indices("request table", num_rows + 1, width)
        self.page_size = page_size
        self.table = torch.zeros(num_rows + 1, width, dtype=torch.int64, device=device)
        self._free_rows = list(range(num_rows, 0, -1))
        self._filled = [0] * (num_rows + 1)  # columns of each row that have slots
        self._offsets = np.arange(page_size)
        self._first_columns: list[int] = []  # of the flat table, where the slots of the pages that wait begin
        self._pages: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows that requests may hold; row 0 is one more."""
        return self.table.shape[0] - 1

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.table.shape[1]

    def acquire(self) -> int:
        """A row that nobody uses; RowsExhaustedError when there is none."""
        check_rows_available(len(self._free_rows), self.num_rows)
        return self._free_rows.pop()

    def append_pages(self, row: int, start: int, pages: list[int]) -> None:
        """Columns [start, start + len(pages) * P) get the slots of ``pages``; ``start`` is where the row ends.

        They are there from `flush` on.
        """
        end = start + len(pages) * self.page_size
        check_row_held(row, self._free_rows, self.num_rows)
        check_row_fits(row, start, end, self.width, self.page_size)
        check_row_continues(row, start, self._filled[row], self.page_size)
        self._filled[row] = end
        first = row * self.width
        self._first_columns += range(first + start, first + end, self.page_size)
        self._pages += pages

    def flush(self) -> None:
        """Write what was appended to all rows since the last time, in one copy; before anybody reads the table."""
        if self._pages:
            where = self._spread(self._first_columns)
            entries = to_device(np.stack((where, self._slots_of(self._pages))), self.table.device)
            self.table.view(-1).index_copy_(0, *entries.unbind(0))
            self._first_columns, self._pages = [], []

    def replace_pages(self, row: int, pages: list[int]) -> None:
        """Write the slots of ``pages`` at columns [0, len(pages) * P), over those of pages with the same tokens."""
        end = len(pages) * self.page_size
        check_row_held(row, self._free_rows, self.num_rows)
        check_row_covers(row, end, self._filled[row], self.page_size)
        self.flush()
        self.table[row, :end] = to_device(self._slots_of(pages), self.table.device)

    def _slots_of(self, pages: list[int]) -> NDArray[np.int64]:
        return self._spread(np.array(pages, np.int64) * self.page_size)

    def _spread(self, firsts: list[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Each of these numbers counted up through a page."""
        return (np.array(firsts, np.int64)[:, None] + self._offsets).ravel()

    def release(self, row: int) -> None:
        """Clear a row and hand it to the next request; RowOwnershipError when nobody holds it."""
        check_row_held(row, self._free_rows, self.num_rows)
        self._filled[row] = 0
        self.flush()
        self.table[row].zero_()
        self._free_rows.append(row)
