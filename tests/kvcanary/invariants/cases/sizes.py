"""Sizes, reserves and estimates that disagree.

Each case: a check, arguments that break its rule, arguments that just do not, the type, the words.
"""

from kvcanary import invariants

CASES = [
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
