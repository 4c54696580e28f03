"""Rows that are not one's own or too short, lengths that do not go together, sizes that disagree.

Each case: a check, arguments that break its rule, arguments that just do not, the type, the words.
"""

from kvcanary import invariants
from kvcanary.invariants import Pressure, Standstill

STILL = "no token has left, no request has ended and nothing new was computed for 257 steps, at most 256 may pass so; "
ROUND = Standstill(["req-3"], {"req-4": 7}, Pressure(9, 6, 2, {"req-3": 0, "req-4": 4}), {"req-4": 129}, {}, ["req-3"])
FAILING = Standstill(
    [], {f"req-{number}": 1 for number in range(10)}, Pressure(3, 8, 0, {"req-0": 3}), failed_loads={"req-0": 257}
)
SHORT = Standstill(["req-0"], {}, Pressure(3, 2, 2, {"req-0": 3}))
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
    (
        invariants.check_run_pages,
        (3, 2, 4),
        (2, 3, 4),
        invariants.IndexLengthError,
        "tokens of 3 whole pages of 4 slots cached with 2 pages: pass a page for each",
    ),
    (
        invariants.check_index_lengths,
        ("draft[1] of pool 'draft'", "kv_indices", 33, [16, 18]),
        ("draft[1] of pool 'draft'", "kv_indices", 34, [16, 18]),
        invariants.IndexLengthError,
        "draft[1] of pool 'draft': kv_indices has 33 entries, its rows' lengths [16, 18] add to 34",
    ),
    (
        invariants.check_chunk,
        ("req-3", 8, 16, 7, 20),
        ("req-3", 8, 16, 8, 20),
        invariants.ChunkError,
        "req-3: chunk [8, 16) must begin at the committed length 7 and end within the prompt of 20 tokens",
    ),
    (
        invariants.check_chunk,
        ("req-3", 8, 21, 8, 20),
        ("req-3", 8, 20, 8, 20),
        invariants.ChunkError,
        "req-3: chunk [8, 21) must begin at the committed length 8 and end within the prompt of 20 tokens",
    ),
    (
        invariants.check_chunk_feed,
        ("req-3", 2, [13, 99], [10, 11, 12, 13, 14]),
        ("req-3", 2, [13, 14], [10, 11, 12, 13, 14]),
        invariants.ChunkError,
        "req-3: draft position 3 is fed token 99, the prompt has 14 there",
    ),
    (
        invariants.check_chunk_feed,
        ("req-3", 2, [98, 14, 99], [10, 11, 12, 13, 14]),
        ("req-3", 2, [13, 14, 99], [10, 11, 12, 13, 14]),
        invariants.ChunkError,
        "req-3: draft position 2 is fed token 98, the prompt has 13 there",
    ),
    (
        invariants.check_commit,
        ("req-3", 20, 25, 5, 4),
        ("req-3", 20, 24, 4, 4),
        invariants.CommitError,
        "req-3: committed length goes from 20 to 25 with 5 tokens accepted, "
        "a step commits what is accepted, 1 to 4 tokens",
    ),
    (
        invariants.check_commit,
        ("req-3", 20, 22, 1, 4),
        ("req-3", 20, 21, 1, 4),
        invariants.CommitError,
        "req-3: committed length goes from 20 to 22 with 1 tokens accepted, "
        "a step commits what is accepted, 1 to 4 tokens",
    ),
    (
        invariants.check_known_tokens,
        ("req-3", 25, 20, 5, False),
        ("req-3", 24, 20, 5, False),
        invariants.CommitError,
        "req-3: prompt 20 + output 5 - committed 25 = 0 tokens pending, must be exactly 1",
    ),
    (
        invariants.check_known_tokens,
        ("req-3", 26, 20, 5, True),
        ("req-3", 25, 20, 5, True),
        invariants.CommitError,
        "req-3: prompt 20 + output 5 - committed 26 = -1 tokens pending, must be at least 0",
    ),
    (
        invariants.check_known_tokens,
        ("req-3", 20, 20, 0, False),
        ("req-3", 8, 20, 0, False),
        invariants.CommitError,
        "req-3: prompt 20 + output 0 - committed 20 = 0 tokens pending, must be at least 1",
    ),
    (
        invariants.check_running,
        ("req-3", False, 2),
        ("req-3", True, 2),
        invariants.NotRunningError,
        "req-3 finished, but it is none of the 2 running requests",
    ),
    (
        invariants.check_progress,
        (257, lambda: ROUND),
        (256, lambda: ROUND),
        invariants.StalledError,
        STILL
        + "running: req-3; waiting for pages: req-4 7; gave up their pages: req-4 129 times, last for req-3; 9 pages "
        "asked for the next forward, 6 could be had, 2 in quarantine; its requests need 4 beyond their own (req-3 0, "
        "req-4 4): what they need is there, so that no setting helps: the estimate, or who admits by it, is wrong",
    ),
    (
        invariants.check_progress,
        (257, lambda: FAILING),
        (0, lambda: FAILING),
        invariants.StalledError,
        STILL + "running: nobody; waiting for pages: req-0 1, req-1 1, req-2 1, req-3 1, req-4 1, req-5 1, req-6 1, "
        "req-7 1, 2 more; sent back by a load from the host that failed: req-0 257 times; 3 pages asked for the next "
        "forward, 8 could be had, 0 in quarantine; its requests need 3 beyond their own (req-0 3): look for what fails "
        "on the host, or do without host_pages",
    ),
    (
        invariants.check_progress,
        (257, lambda: SHORT),
        (0, lambda: SHORT),
        invariants.StalledError,
        STILL + "running: req-0; waiting for pages: nobody; 3 pages asked for the next forward, 2 could be had, 2 in "
        "quarantine; its requests need 3 beyond their own (req-0 3): raise max_total_tokens or new_token_ratio, or "
        "lower max_running_requests",
    ),
    (
        invariants.check_step_estimate,
        ("overlap", 5, 4, 3, 16),
        ("overlap", 4, 4, 3, 16),
        invariants.EstimateMismatchError,
        "a decode step of 3 requests was estimated at 5 pages of 16 slots, it took 4 (schedule overlap): "
        "estimate and allocation must call pages_for with one reserve",
    ),
    (
        invariants.check_pool_slots,
        ("target", 36, 9, 4),
        ("target", 40, 9, 4),
        invariants.PoolSizeError,
        "pool 'target' has 36 slots, 9 pages and the null page of 4 slots need 40",
    ),
    (
        invariants.check_page_sizes,
        ({"scheduler": 16, "pool 'draft'": 4},),
        ({"scheduler": 16, "pool 'draft'": 16},),
        invariants.PageSizeError,
        "page_size must be one, got scheduler 16, pool 'draft' 4: pass the same to all",
    ),
    (
        invariants.check_reserve,
        (19, 1, 4, 16),
        (20, 1, 4, 16),
        invariants.ReserveError,
        "reserve 19 < lag 1 * max_accept 4 + alloc_len 16 = 20: size it by the longest draft",
    ),
    (
        invariants.check_flat_indices,
        ("request table", 1 << 14, 1 << 17),
        ("request table", (1 << 14) - 1, 1 << 17),
        invariants.IndexOverflowError,
        "request table: 16384 rows * 131072 columns = 2147483648 must be below 2147483648: "
        "lower max_running_requests, topk or context_length",
    ),
    (
        invariants.check_staging,
        ("results 0", 3, 4, 2),
        ("results 0", 3, 3, 2),
        invariants.StagingError,
        "host buffer 'results 0' is read for its use 3, it is in its use 4: a ring of 2 buffers is too short for the "
        "steps that the host is behind",
    ),
    (
        invariants.check_staging_room,
        ("results", 33, 32),
        ("results", 32, 32),
        invariants.StagingError,
        "33 numbers are put into 'results', which has room for 32: size it by the largest",
    ),
    (
        invariants.check_estimate,
        ("req-3", 7, 7, 16, 4, 9),
        ("req-3", 6, 7, 16, 4, 6),
        invariants.EstimateError,
        "req-3 owns 7 pages, committed 7 + reserve 16 slots at page_size 4 need 6",
    ),
    (
        invariants.check_estimate,
        ("req-3", 6, 7, 16, 4, 5),
        ("req-3", 5, 1, 16, 4, 5),
        invariants.EstimateError,
        "req-3 owns 6 pages, it was admitted for 5 of 4 slots at most",
    ),
    (
        invariants.check_lengths,
        ("req-3", 17, 16, 40),
        ("req-3", 16, 16, 40),
        invariants.LengthOrderError,
        "req-3: 0 <= committed 17 <= allocated 16 <= row width 40 is broken",
    ),
    (
        invariants.check_lengths,
        ("req-3", 17, 44, 40),
        ("req-3", 0, 40, 40),
        invariants.LengthOrderError,
        "req-3: 0 <= committed 17 <= allocated 44 <= row width 40 is broken",
    ),
]
