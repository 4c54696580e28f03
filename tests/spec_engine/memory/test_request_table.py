"""The request table maps positions to slots and never lets a row reach its neighbour."""

import pytest
import torch

from kvcanary.invariants import RowOverflowError
from spec_engine.memory.request_table import RequestTable


def table() -> RequestTable:
    return RequestTable(num_rows=2, width=10, page_size=4, device=torch.device("cpu"))


def test_append_pages_writes_the_slots_of_whole_pages():
    """Page 3 then page 1 at columns 0 to 7."""
    rows = table()
    row = rows.acquire()
    rows.append_pages(row, 0, [3, 1])
    assert rows.table[row, :8].tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


def test_append_pages_refuses_to_run_over_the_row():
    """A third page of four slots does not fit into ten columns, and the row stays as it was."""
    rows = table()
    row = rows.acquire()
    with pytest.raises(RowOverflowError, match="columns \\[8, 12\\), its width is 10"):
        rows.append_pages(row, 8, [1])
    assert not rows.table.any()


def test_release_clears_the_row():
    """The next owner of a row finds zeros, and row 0 is never handed out."""
    rows = table()
    row = rows.acquire()
    rows.append_pages(row, 0, [1])
    rows.release(row)
    assert not rows.table.any()
    assert {rows.acquire(), rows.acquire()} == {1, 2}
