"""The request table: for each running request, the slot of every position. Row 0 is for padding, always zero."""

from __future__ import annotations

import torch

from kvcanary.invariants import RowOverflowError


class RequestTable:
    """``table [rows + 1, width] int64``: ``table[row, p]`` is the slot of logical position p."""

    def __init__(self, num_rows: int, width: int, page_size: int, device: torch.device) -> None:
        self.width = width
        self.page_size = page_size
        self.table = torch.zeros(num_rows + 1, width, dtype=torch.int64, device=device)
        self._free_rows = list(range(num_rows, 0, -1))
        self._offsets = torch.arange(page_size, device=device)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def acquire(self) -> int:
        """A row that nobody uses."""
        return self._free_rows.pop()

    def append_pages(self, row: int, start: int, pages: list[int]) -> None:
        """Write the slots of ``pages`` at columns [start, start + len(pages) * P); ``start`` is page aligned."""
        end = start + len(pages) * self.page_size
        if end > self.width:
            raise RowOverflowError(
                f"row {row} needs columns [{start}, {end}), its width is {self.width}: "
                f"{len(pages)} pages of {self.page_size} slots do not fit"
            )
        first_slots = torch.tensor(pages, device=self.table.device) * self.page_size
        self.table[row, start:end] = (first_slots[:, None] + self._offsets).flatten()

    def release(self, row: int) -> None:
        """Clear a row and hand it to the next request."""
        self.table[row].zero_()
        self._free_rows.append(row)
