"""Lengths and tokens that do not go together.

Each case: a check, arguments that break its rule, arguments that just do not, the type, the words.
"""

from kvcanary import invariants

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
        (257, ["req-3", "req-4"], 2),
        (256, ["req-3", "req-4"], 2),
        invariants.StalledError,
        "no forward has had a request for 257 steps, at most 256 may pass so: req-3, req-4 running, 2 waiting",
    ),
]
