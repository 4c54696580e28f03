"""Rows of the request table that are not one's own, or too short.

Each case: a check, arguments that break its rule, arguments that just do not, the type, the words.
"""

from kvcanary import invariants

CASES = [
    (
        invariants.check_row_covers,
        (1, 12, 8, 4),
        (1, 8, 8, 4),
        invariants.RowGapError,
        "row 1 is filled to column 8, 3 pages of 4 slots replaced up to column 12",
    ),
    (
        invariants.check_rows_available,
        (0, 8),
        (1, 8),
        invariants.RowsExhaustedError,
        "1 row needed, 0 of 8 free: more requests run than max_running_requests",
    ),
    (
        invariants.check_row_held,
        (2, [2, 1], 8),
        (3, [2, 1], 8),
        invariants.RowOwnershipError,
        "row 2 of 1 to 8 used, but no request holds it",
    ),
    (
        invariants.check_row_held,
        (9, [], 8),
        (8, [], 8),
        invariants.RowOwnershipError,
        "row 9 of 1 to 8 used, but no request holds it",
    ),
    (
        invariants.check_row_held,
        (0, [], 8),
        (1, [], 8),
        invariants.NullPageError,
        "row 0 used for a request, it is padding's: rows begin at 1",
    ),
    (
        invariants.check_row_width,
        (619, 635),
        (635, 635),
        invariants.RowOverflowError,
        "rows of the request table have 619 columns, the longest request and its reserve, rounded to pages, need 635",
    ),
    (
        invariants.check_row_fits,
        (2, 8, 16, 15, 4),
        (2, 8, 16, 16, 4),
        invariants.RowOverflowError,
        "row 2 needs columns [8, 16), its width is 15: 2 pages of 4 slots do not fit",
    ),
    (
        invariants.check_row_continues,
        (2, 12, 8, 4),
        (2, 8, 8, 4),
        invariants.RowGapError,
        "row 2 is filled to column 8, pages of 4 slots appended at column 12",
    ),
    (
        invariants.check_row_continues,
        (2, 6, 6, 4),
        (2, 0, 0, 4),
        invariants.RowGapError,
        "row 2 is filled to column 6, pages of 4 slots appended at column 6",
    ),
    (
        invariants.check_rows_distinct,
        (["req-0", "req-3"], [2, 2]),
        (["req-0", "req-3"], [2, 1]),
        invariants.RowOwnershipError,
        "2 requests of a batch need 2 rows of their own, got req-0 row 2, req-3 row 2",
    ),
    (
        invariants.check_rows_distinct,
        (["req-0"], [0]),
        (["req-0"], [1]),
        invariants.NullPageError,
        "req-0 uses row 0, it is padding's: rows begin at 1",
    ),
]
