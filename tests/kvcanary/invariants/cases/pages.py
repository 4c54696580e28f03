"""Pages that are handed out, freed, shared and counted wrongly.

Each case: a check, arguments that break its rule, arguments that just do not, the type, the words.
"""

from kvcanary import invariants

CASES = [
    (
        invariants.check_pages_available,
        (3, 2, 7),
        (2, 2, 7),
        invariants.PoolExhaustedError,
        "3 pages needed, 2 of 7 free: raise max_total_tokens or lower max_running_requests",
    ),
    (
        invariants.check_pages_granted,
        ([4, 5], {5, 6}, 9),
        ([4, 7], {5, 6}, 9),
        invariants.PageAliasError,
        "page 5 handed out with [4, 5], but it is one of 2 taken",
    ),
    (
        invariants.check_pages_granted,
        ([4, 4], set(), 9),
        ([4], set(), 9),
        invariants.PageAliasError,
        "pages [4, 4] handed out, 2 in all, but 1 different",
    ),
    (
        invariants.check_pages_granted,
        ([0, 1], set(), 9),
        ([1], set(), 9),
        invariants.NullPageError,
        "page 0 handed out with [0, 1], it is padding's: pages are 1 to 9",
    ),
    (
        invariants.check_pages_granted,
        ([10], set(), 9),
        ([9], set(), 9),
        invariants.PoolSizeError,
        "page 10 handed out with [10], the pool has pages 1 to 9",
    ),
    (
        invariants.check_pages_freed,
        ([4, 5], {4}),
        ([4], {4}),
        invariants.DoubleFreeError,
        "pages [4, 5] freed, but [5] not allocated",
    ),
    (
        invariants.check_pages_freed,
        ([4, 4], {4}),
        ([], {4}),
        invariants.DoubleFreeError,
        "pages [4, 4] freed, but some of them twice not allocated",
    ),
    (
        invariants.check_pages_ready,
        (3, 1, 2),
        (3, 3, 0),
        invariants.PagesQuarantinedError,
        "3 pages needed, 1 ready and 2 more in quarantine since this step: wait a step",
    ),
    (
        invariants.check_generations,
        ([4, 5], [3, 1], [3, 3]),
        ([4, 5], [3, 1], [3, 1]),
        invariants.DoubleFreeError,
        "pages [4, 5] of generations [3, 1] freed, but [5] were freed since: generations are [3, 3]",
    ),
    (
        invariants.check_pages_shared,
        ([4, 5], {4: 1}),
        ([4], {4: 1}),
        invariants.StalePageError,
        "pages [4, 5] shared, but [5] are free: evict a prefix before its last reference goes",
    ),
    (
        invariants.check_references,
        ({4: 2, 5: 1}, {4: 2}),
        ({4: 2, 5: 1}, {5: 1, 4: 2}),
        invariants.ReferenceCountError,
        "references of page 5 are 1, rows and prefix tree name it 0 times",
    ),
    (
        invariants.check_pages_add_up,
        (5, 1, 1, 0, 0, 9),
        (5, 1, 1, 1, 1, 9),
        invariants.PageLeakError,
        "5 pages free + 1 quarantined + 1 owned by requests + 0 evictable + 0 protected in the prefix tree = 7 "
        "!= 9 in all: 2 leaked",
    ),
    (
        invariants.check_pages_add_up,
        (5, 0, 2, 1, 2, 9),
        (9, 0, 0, 0, 0, 9),
        invariants.PageLeakError,
        "5 pages free + 0 quarantined + 2 owned by requests + 1 evictable + 2 protected in the prefix tree = 10 "
        "!= 9 in all: 1 counted twice",
    ),
    (
        invariants.check_pages_final,
        ("req-1", 3, 11, 4),
        ("req-1", 3, 12, 4),
        invariants.WritablePageError,
        "req-1 publishes 3 pages of 4 slots, it has committed 11 and may write behind that: publish 2",
    ),
    (
        invariants.check_pages_uncached,
        ([4, 5], {5}),
        ([4, 5], {6}),
        invariants.PageAliasError,
        "pages [4, 5] cached, but [5] already stand for another prefix",
    ),
    (
        invariants.check_pages_uncached,
        ([4, 4], set()),
        ([4], set()),
        invariants.PageAliasError,
        "pages [4, 4] cached, but some of them twice already stand for another prefix",
    ),
    (
        invariants.check_prefix_lock,
        (0, False),
        (0, True),
        invariants.PrefixLockError,
        "a prefix that the tree has evicted was locked or unlocked: lock what was just matched",
    ),
    (
        invariants.check_prefix_lock,
        (-1, True),
        (2, True),
        invariants.PrefixLockError,
        "a prefix was unlocked once more than locked, its locks would be -1",
    ),
]
