"""Lengths and tokens that do not go together.

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
]
