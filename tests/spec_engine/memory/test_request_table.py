"""The request table maps positions to slots and never lets a row reach its neighbour."""

import pytest
import torch

from kvcanary.invariants import (
    IndexOverflowError,
    NullPageError,
    RowGapError,
    RowOverflowError,
    RowOwnershipError,
    RowsExhaustedError,
)
from spec_engine.memory.request_table import RequestTable
from spec_engine.step.transfer import to_device


def table() -> RequestTable:
    return RequestTable(num_rows=2, width=10, page_size=4, device=torch.device("cpu"))


def test_append_pages_writes_the_slots_of_whole_pages():
    """Page 3 then page 1 at columns 0 to 7, from the flush on."""
    rows = table()
    row = rows.acquire()
    rows.append_pages(row, 0, [3, 1])
    rows.flush()
    assert rows.table[row, :8].tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


def test_flush_writes_the_rows_of_a_step_together(monkeypatch):
    """However many rows have grown, the device is told once, and of nothing twice."""
    copies = []

    def copied(numbers, device):
        copies.append(numbers)
        return to_device(numbers, device)

    monkeypatch.setattr("spec_engine.memory.request_table.to_device", copied)
    rows = table()
    one, other = rows.acquire(), rows.acquire()
    rows.append_pages(one, 0, [3])
    rows.append_pages(other, 0, [2])
    rows.append_pages(one, 4, [1])
    assert not rows.table.any()
    rows.flush()
    rows.flush()
    assert rows.table[one].tolist() == [12, 13, 14, 15, 4, 5, 6, 7, 0, 0]
    assert rows.table[other].tolist() == [8, 9, 10, 11, 0, 0, 0, 0, 0, 0]
    assert len(copies) == 1


def test_append_pages_refuses_to_run_over_the_row():
    """A third page of four slots does not fit into ten columns, and the row stays as it was."""
    rows = table()
    row = rows.acquire()
    with pytest.raises(RowOverflowError, match="columns \\[8, 12\\), its width is 10"):
        rows.append_pages(row, 8, [1])
    rows.flush()
    assert not rows.table.any()


def test_release_clears_the_row():
    """The next owner of a row finds zeros, and row 0 is never handed out."""
    rows = table()
    row = rows.acquire()
    rows.append_pages(row, 0, [1])
    rows.release(row)
    rows.flush()
    assert not rows.table.any()
    assert {rows.acquire(), rows.acquire()} == {1, 2}


@pytest.mark.parametrize("start", [0, 5])
def test_append_pages_refuses_to_skip_or_to_overwrite_columns(start):
    """Pages continue the row where it ends: a page that the caller forgot or counts twice moves every slot after it."""
    rows = table()
    row = rows.acquire()
    rows.append_pages(row, 0, [2])
    with pytest.raises(RowGapError, match=f"filled to column 4, pages of 4 slots appended at column {start}"):
        rows.append_pages(row, start, [1])
    rows.flush()
    assert rows.table[row, 4:].tolist() == [0] * 6


def test_rows_are_released_once_and_never_padding():
    """A second release would hand one row to two requests; row 0 belongs to padding."""
    rows = table()
    row = rows.acquire()
    rows.release(row)
    with pytest.raises(RowOwnershipError, match=f"row {row} of 1 to 2 used, but no request holds it"):
        rows.release(row)
    with pytest.raises(NullPageError, match="row 0 used for a request"):
        rows.append_pages(0, 0, [1])
    assert [rows.acquire(), rows.acquire()] == [1, 2]


def test_acquire_says_when_no_row_is_left():
    """More requests than rows is a typed error with the number of rows."""
    rows = table()
    rows.acquire()
    rows.acquire()
    with pytest.raises(RowsExhaustedError, match="0 of 2 free"):
        rows.acquire()


def test_a_table_beyond_32_bit_indices_is_refused_before_it_is_allocated():
    """Row * width must fit into the signed 32-bit integers of kernels."""
    with pytest.raises(IndexOverflowError, match=r"request table: 65537 rows \* 32768 columns = 2147516416"):
        RequestTable(num_rows=1 << 16, width=1 << 15, page_size=16, device=torch.device("cpu"))


def test_replace_pages_writes_over_the_head_of_a_row():
    """A page that the prefix tree had before takes the place of the request's own."""
    rows = table()
    row = rows.acquire()
    rows.append_pages(row, 0, [3, 1])
    rows.replace_pages(row, [2])
    rows.flush()
    assert rows.table[row, :8].tolist() == [8, 9, 10, 11, 4, 5, 6, 7]


def test_replace_pages_stays_within_what_the_row_has():
    """Columns without slots are appended, not replaced; the row stays as it was."""
    rows = table()
    row = rows.acquire()
    rows.append_pages(row, 0, [3])
    with pytest.raises(RowGapError, match="filled to column 4, 2 pages of 4 slots replaced up to column 8"):
        rows.replace_pages(row, [2, 1])
    with pytest.raises(RowOwnershipError):
        rows.replace_pages(2 if row == 1 else 1, [])
    rows.flush()
    assert rows.table[row, :4].tolist() == [12, 13, 14, 15]
