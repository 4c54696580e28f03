"""The request table: whose a row is, and where it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvcanary.invariants.errors import (
    NullPageError,
    RowGapError,
    RowOverflowError,
    RowOwnershipError,
    RowsExhaustedError,
)


def check_rows_available(free: int, total: int) -> None:
    if not free:
        raise RowsExhaustedError(f"1 row needed, 0 of {total} free: more requests run than max_running_requests")


def check_row_held(row: int, free_rows: Collection[int], num_rows: int) -> None:
    """A row that is written or released belongs to a request."""
    if row == 0:
        raise NullPageError("row 0 used for a request, it is padding's: rows begin at 1")
    if not 0 < row <= num_rows or row in free_rows:
        raise RowOwnershipError(f"row {row} of 1 to {num_rows} used, but no request holds it")


def check_row_width(width: int, needed: int) -> None:
    """Rows of the request table are as wide as the longest request was planned to need."""
    if width < needed:
        raise RowOverflowError(
            f"rows of the request table have {width} columns, the longest request and its reserve, rounded to pages, "
            f"need {needed}"
        )


def check_row_fits(row: int, start: int, end: int, width: int, page_size: int) -> None:
    if end > width:
        raise RowOverflowError(
            f"row {row} needs columns [{start}, {end}), its width is {width}: "
            f"{(end - start) // page_size} pages of {page_size} slots do not fit"
        )


def check_row_continues(row: int, start: int, filled: int, page_size: int) -> None:
    """Pages are appended where the row ends, at a page boundary: no column is skipped or written twice."""
    if start != filled or start % page_size:
        raise RowGapError(
            f"row {row} is filled to column {filled}, pages of {page_size} slots appended at column {start}"
        )


def check_row_covers(row: int, end: int, filled: int, page_size: int) -> None:
    """Pages are replaced where the row has some."""
    if end > filled:
        raise RowGapError(
            f"row {row} is filled to column {filled}, {end // page_size} pages of {page_size} slots replaced up to "
            f"column {end}"
        )


def check_rows_distinct(requests: Sequence[str], rows: Sequence[int]) -> None:
    """The requests of one batch use different rows, none of them padding's."""
    if 0 in rows:
        raise NullPageError(f"{requests[rows.index(0)]} uses row 0, it is padding's: rows begin at 1")
    if len(set(rows)) != len(rows):
        named = ", ".join(f"{request} row {row}" for request, row in zip(requests, rows, strict=True))
        raise RowOwnershipError(f"{len(rows)} requests of a batch need {len(rows)} rows of their own, got {named}")
