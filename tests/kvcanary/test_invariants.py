"""Every always-on check: the broken rule is raised in these words, its clean twin passes, also under `python -O`."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvcanary import KVCanaryError, invariants
from kvcanary.invariants import InvariantError


@dataclass(frozen=True)
class Case:
    """One check with arguments that break its rule, and with arguments that just do not."""

    check: Callable[..., None]
    broken: tuple
    clean: tuple
    error: type[InvariantError]
    words: str


CASES = [
    Case(
        invariants.check_pages_available,
        (3, 2, 7),
        (2, 2, 7),
        invariants.PoolExhaustedError,
        "3 pages needed, 2 of 7 free: raise max_total_tokens or lower max_running_requests",
    ),
    Case(
        invariants.check_pages_granted,
        ([4, 5], {5, 6}, 9),
        ([4, 7], {5, 6}, 9),
        invariants.PageAliasError,
        "page 5 handed out with [4, 5], but it is one of 2 taken",
    ),
    Case(
        invariants.check_pages_granted,
        ([4, 4], set(), 9),
        ([4], set(), 9),
        invariants.PageAliasError,
        "pages [4, 4] handed out, 2 in all, but 1 different",
    ),
    Case(
        invariants.check_pages_granted,
        ([0, 1], set(), 9),
        ([1], set(), 9),
        invariants.NullPageError,
        "page 0 handed out with [0, 1], it is padding's: pages are 1 to 9",
    ),
    Case(
        invariants.check_pages_granted,
        ([10], set(), 9),
        ([9], set(), 9),
        invariants.PoolSizeError,
        "page 10 handed out with [10], the pool has pages 1 to 9",
    ),
    Case(
        invariants.check_pages_freed,
        ([4, 5], {4}),
        ([4], {4}),
        invariants.DoubleFreeError,
        "pages [4, 5] freed, but [5] not allocated",
    ),
    Case(
        invariants.check_pages_freed,
        ([4, 4], {4}),
        ([], {4}),
        invariants.DoubleFreeError,
        "pages [4, 4] freed, but some of them twice not allocated",
    ),
    Case(
        invariants.check_pages_ready,
        (3, 1, 2),
        (3, 3, 0),
        invariants.PagesQuarantinedError,
        "3 pages needed, 1 ready and 2 more in quarantine since this step: wait a step",
    ),
    Case(
        invariants.check_generations,
        ([4, 5], [3, 1], [3, 3]),
        ([4, 5], [3, 1], [3, 1]),
        invariants.DoubleFreeError,
        "pages [4, 5] of generations [3, 1] freed, but [5] were freed since: generations are [3, 3]",
    ),
    Case(
        invariants.check_pages_shared,
        ([4, 5], {4: 1}),
        ([4], {4: 1}),
        invariants.StalePageError,
        "pages [4, 5] shared, but [5] are free: evict a prefix before its last reference goes",
    ),
    Case(
        invariants.check_references,
        ({4: 2, 5: 1}, {4: 2}),
        ({4: 2, 5: 1}, {5: 1, 4: 2}),
        invariants.ReferenceCountError,
        "references of page 5 are 1, rows and prefix tree name it 0 times",
    ),
    Case(
        invariants.check_pages_add_up,
        (5, 1, 1, 0, 0, 9),
        (5, 1, 1, 1, 1, 9),
        invariants.PageLeakError,
        "5 pages free + 1 quarantined + 1 owned by requests + 0 evictable + 0 protected in the prefix tree = 7 "
        "!= 9 in all: 2 leaked",
    ),
    Case(
        invariants.check_pages_add_up,
        (5, 0, 2, 1, 2, 9),
        (9, 0, 0, 0, 0, 9),
        invariants.PageLeakError,
        "5 pages free + 0 quarantined + 2 owned by requests + 1 evictable + 2 protected in the prefix tree = 10 "
        "!= 9 in all: 1 counted twice",
    ),
    Case(
        invariants.check_pages_final,
        ("req-1", 3, 11, 4),
        ("req-1", 3, 12, 4),
        invariants.WritablePageError,
        "req-1 publishes 3 pages of 4 slots, it has committed 11 and may write behind that: publish 2",
    ),
    Case(
        invariants.check_pages_uncached,
        ([4, 5], {5}),
        ([4, 5], {6}),
        invariants.PageAliasError,
        "pages [4, 5] cached, but [5] already stand for another prefix",
    ),
    Case(
        invariants.check_pages_uncached,
        ([4, 4], set()),
        ([4], set()),
        invariants.PageAliasError,
        "pages [4, 4] cached, but some of them twice already stand for another prefix",
    ),
    Case(
        invariants.check_prefix_lock,
        (0, False),
        (0, True),
        invariants.PrefixLockError,
        "a prefix that the tree has evicted was locked or unlocked: lock what was just matched",
    ),
    Case(
        invariants.check_prefix_lock,
        (-1, True),
        (2, True),
        invariants.PrefixLockError,
        "a prefix was unlocked once more than locked, its locks would be -1",
    ),
    Case(
        invariants.check_run_pages,
        (3, 2, 4),
        (2, 3, 4),
        invariants.IndexLengthError,
        "tokens of 3 whole pages of 4 slots cached with 2 pages: pass a page for each",
    ),
    Case(
        invariants.check_step_estimate,
        ("overlap", 5, 4, 3, 16),
        ("overlap", 4, 4, 3, 16),
        invariants.EstimateMismatchError,
        "a decode step of 3 requests was estimated at 5 pages of 16 slots, it took 4 (schedule overlap): "
        "estimate and allocation must call pages_for with one reserve",
    ),
    Case(
        invariants.check_row_covers,
        (1, 12, 8, 4),
        (1, 8, 8, 4),
        invariants.RowGapError,
        "row 1 is filled to column 8, 3 pages of 4 slots replaced up to column 12",
    ),
    Case(
        invariants.check_pool_slots,
        ("target", 36, 9, 4),
        ("target", 40, 9, 4),
        invariants.PoolSizeError,
        "pool 'target' has 36 slots, 9 pages and the null page of 4 slots need 40",
    ),
    Case(
        invariants.check_page_sizes,
        ({"scheduler": 16, "pool 'draft'": 4},),
        ({"scheduler": 16, "pool 'draft'": 16},),
        invariants.PageSizeError,
        "page_size must be one, got scheduler 16, pool 'draft' 4: pass the same to all",
    ),
    Case(
        invariants.check_reserve,
        (19, 1, 4, 16),
        (20, 1, 4, 16),
        invariants.ReserveError,
        "reserve 19 < lag 1 * max_accept 4 + alloc_len 16 = 20: size it by the longest draft",
    ),
    Case(
        invariants.check_flat_indices,
        ("request table", 1 << 14, 1 << 17),
        ("request table", (1 << 14) - 1, 1 << 17),
        invariants.IndexOverflowError,
        "request table: 16384 rows * 131072 columns = 2147483648 must be below 2147483648: "
        "lower max_running_requests, topk or context_length",
    ),
    Case(
        invariants.check_estimate,
        ("req-3", 7, 7, 16, 4, 9),
        ("req-3", 6, 7, 16, 4, 6),
        invariants.EstimateError,
        "req-3 owns 7 pages, committed 7 + reserve 16 slots at page_size 4 need 6",
    ),
    Case(
        invariants.check_estimate,
        ("req-3", 6, 7, 16, 4, 5),
        ("req-3", 5, 1, 16, 4, 5),
        invariants.EstimateError,
        "req-3 owns 6 pages, it was admitted for 5 of 4 slots at most",
    ),
    Case(
        invariants.check_lengths,
        ("req-3", 17, 16, 40),
        ("req-3", 16, 16, 40),
        invariants.LengthOrderError,
        "req-3: 0 <= committed 17 <= allocated 16 <= row width 40 is broken",
    ),
    Case(
        invariants.check_lengths,
        ("req-3", 17, 44, 40),
        ("req-3", 0, 40, 40),
        invariants.LengthOrderError,
        "req-3: 0 <= committed 17 <= allocated 44 <= row width 40 is broken",
    ),
    Case(
        invariants.check_rows_available,
        (0, 8),
        (1, 8),
        invariants.RowsExhaustedError,
        "1 row needed, 0 of 8 free: more requests run than max_running_requests",
    ),
    Case(
        invariants.check_row_held,
        (2, [2, 1], 8),
        (3, [2, 1], 8),
        invariants.RowOwnershipError,
        "row 2 of 1 to 8 used, but no request holds it",
    ),
    Case(
        invariants.check_row_held,
        (9, [], 8),
        (8, [], 8),
        invariants.RowOwnershipError,
        "row 9 of 1 to 8 used, but no request holds it",
    ),
    Case(
        invariants.check_row_held,
        (0, [], 8),
        (1, [], 8),
        invariants.NullPageError,
        "row 0 used for a request, it is padding's: rows begin at 1",
    ),
    Case(
        invariants.check_row_fits,
        (2, 8, 16, 15, 4),
        (2, 8, 16, 16, 4),
        invariants.RowOverflowError,
        "row 2 needs columns [8, 16), its width is 15: 2 pages of 4 slots do not fit",
    ),
    Case(
        invariants.check_row_continues,
        (2, 12, 8, 4),
        (2, 8, 8, 4),
        invariants.RowGapError,
        "row 2 is filled to column 8, pages of 4 slots appended at column 12",
    ),
    Case(
        invariants.check_row_continues,
        (2, 6, 6, 4),
        (2, 0, 0, 4),
        invariants.RowGapError,
        "row 2 is filled to column 6, pages of 4 slots appended at column 6",
    ),
    Case(
        invariants.check_rows_distinct,
        (["req-0", "req-3"], [2, 2]),
        (["req-0", "req-3"], [2, 1]),
        invariants.RowOwnershipError,
        "2 requests of a batch need 2 rows of their own, got req-0 row 2, req-3 row 2",
    ),
    Case(
        invariants.check_rows_distinct,
        (["req-0"], [0]),
        (["req-0"], [1]),
        invariants.NullPageError,
        "req-0 uses row 0, it is padding's: rows begin at 1",
    ),
    Case(
        invariants.check_index_lengths,
        ("draft[1] of pool 'draft'", "kv_indices", 33, [16, 18]),
        ("draft[1] of pool 'draft'", "kv_indices", 34, [16, 18]),
        invariants.IndexLengthError,
        "draft[1] of pool 'draft': kv_indices has 33 entries, its rows' lengths [16, 18] add to 34",
    ),
    Case(
        invariants.check_chunk,
        ("req-3", 8, 16, 7, 20),
        ("req-3", 8, 16, 8, 20),
        invariants.ChunkError,
        "req-3: chunk [8, 16) must begin at the committed length 7 and end within the prompt of 20 tokens",
    ),
    Case(
        invariants.check_chunk,
        ("req-3", 8, 21, 8, 20),
        ("req-3", 8, 20, 8, 20),
        invariants.ChunkError,
        "req-3: chunk [8, 21) must begin at the committed length 8 and end within the prompt of 20 tokens",
    ),
    Case(
        invariants.check_chunk_feed,
        ("req-3", 2, [13, 99], [10, 11, 12, 13, 14]),
        ("req-3", 2, [13, 14], [10, 11, 12, 13, 14]),
        invariants.ChunkError,
        "req-3: draft position 3 is fed token 99, the prompt has 14 there",
    ),
    Case(
        invariants.check_chunk_feed,
        ("req-3", 2, [98, 14, 99], [10, 11, 12, 13, 14]),
        ("req-3", 2, [13, 14, 99], [10, 11, 12, 13, 14]),
        invariants.ChunkError,
        "req-3: draft position 2 is fed token 98, the prompt has 13 there",
    ),
    Case(
        invariants.check_commit,
        ("req-3", 20, 25, 5, 4),
        ("req-3", 20, 24, 4, 4),
        invariants.CommitError,
        "req-3: committed length goes from 20 to 25 with 5 tokens accepted, "
        "a step commits what is accepted, 1 to 4 tokens",
    ),
    Case(
        invariants.check_commit,
        ("req-3", 20, 22, 1, 4),
        ("req-3", 20, 21, 1, 4),
        invariants.CommitError,
        "req-3: committed length goes from 20 to 22 with 1 tokens accepted, "
        "a step commits what is accepted, 1 to 4 tokens",
    ),
    Case(
        invariants.check_known_tokens,
        ("req-3", 25, 20, 5, False),
        ("req-3", 24, 20, 5, False),
        invariants.CommitError,
        "req-3: prompt 20 + output 5 - committed 25 = 0 tokens pending, must be exactly 1",
    ),
    Case(
        invariants.check_known_tokens,
        ("req-3", 26, 20, 5, True),
        ("req-3", 25, 20, 5, True),
        invariants.CommitError,
        "req-3: prompt 20 + output 5 - committed 26 = -1 tokens pending, must be at least 0",
    ),
    Case(
        invariants.check_known_tokens,
        ("req-3", 20, 20, 0, False),
        ("req-3", 8, 20, 0, False),
        invariants.CommitError,
        "req-3: prompt 20 + output 0 - committed 20 = 0 tokens pending, must be at least 1",
    ),
    Case(
        invariants.check_running,
        ("req-3", False, 2),
        ("req-3", True, 2),
        invariants.NotRunningError,
        "req-3 finished, but it is none of the 2 running requests",
    ),
    Case(
        invariants.check_branch_shape,
        ([2, 5, 4], 2, 4, 5),
        ([2, 4, 5], 2, 4, 5),
        invariants.BranchLayoutError,
        "branch slots are [2, 5, 4], 2 requests with topk 4 and num_steps 5 need [2, 4, 5]",
    ),
    Case(
        invariants.check_branches,
        ("req-3", 7, 8, 2, 3, 17),
        ("req-3", 7, 8, 2, 3, 18),
        invariants.BranchLayoutError,
        "req-3: 2 branches of 3 slots from 7, 8 apart, end at 18: they must not overlap and end by 17, "
        "what is allocated",
    ),
    Case(
        invariants.check_branches,
        ("req-3", 7, 2, 2, 3, 40),
        ("req-3", 7, 3, 2, 3, 40),
        invariants.BranchLayoutError,
        "req-3: 2 branches of 3 slots from 7, 2 apart, end at 12: they must not overlap and end by 40, "
        "what is allocated",
    ),
    Case(
        invariants.check_window,
        ("req-3", 7, 4, 10),
        ("req-3", 7, 4, 11),
        invariants.BranchLayoutError,
        "req-3: verify window [7, 11) of 4 nodes ends beyond the 10 slots that are allocated",
    ),
    Case(
        invariants.check_draft_indices,
        ((10, 20, 30, 40), 2, 2, 223),
        ((10, 20, 30, 40), 2, 2, 224),
        invariants.IndexBufferError,
        "draft[2]: topk 2 * committed 100 + requests 4 * topk 2 * own slots 3 = 224 index entries <= row width 223 < "
        "2147483648 is broken: the width is max_running_requests * topk * columns of a request-table row",
    ),
    Case(
        invariants.check_draft_indices,
        ((5,), 1, 0, 1 << 31),
        ((5,), 1, 0, (1 << 31) - 1),
        invariants.IndexBufferError,
        "draft[0]: topk 1 * committed 5 + requests 1 * topk 1 * own slots 1 = 6 index entries <= row width 2147483648 "
        "< 2147483648 is broken: the width is max_running_requests * topk * columns of a request-table row",
    ),
    Case(
        invariants.check_relay,
        ("req-3", 2, 20, ("req-1", 20)),
        ("req-3", 2, 20, ("req-3", 20)),
        invariants.RelayError,
        "req-3 drafts at length 20, but the proposals of row 2 are those of req-1 at length 20",
    ),
    Case(
        invariants.check_relay,
        ("req-3", 2, 20, None),
        ("req-3", 2, 21, ("req-3", 21)),
        invariants.RelayError,
        "req-3 drafts at length 20, but the proposals of row 2 are nobody's",
    ),
    Case(
        invariants.check_staging,
        ("results 0", 3, 4, 2),
        ("results 0", 3, 3, 2),
        invariants.StagingError,
        "host buffer 'results 0' is read for its use 3, it is in its use 4: a ring of 2 buffers is too short for the "
        "steps that the host is behind",
    ),
    Case(
        invariants.check_tree_array,
        ("parent list", (2, 5), (2, 5), "int32", True),
        ("parent list", (2, 5), (2, 5), "int64", True),
        invariants.TreeShapeError,
        "parent list must be contiguous int64 [2, 5], got contiguous int32 [2, 5]: its readers step by "
        "8 bytes an entry, topk and num_steps make the width",
    ),
    Case(
        invariants.check_chain_nodes,
        (3, 5),
        (3, 4),
        invariants.TreeShapeError,
        "num_draft_tokens of a chain must be num_steps + 1 = 4, got 5: topk 1 keeps every draft, "
        "and the root is one more",
    ),
    Case(
        invariants.check_chain_constants,
        (8, 4, 9, 3, 4),
        (8, 4, 8, 3, 4),
        invariants.ChainConstantsError,
        "chain constants are those of 3 steps and at most 8 requests, got 3 drafts of 9 requests for trees of 4 nodes: "
        "rebuild them whenever num_steps changes",
    ),
    Case(
        invariants.check_candidates,
        (4, 6),
        (4, 5),
        invariants.TreeShapeError,
        "a tree of 6 nodes needs 5 candidates beside its root, has 4: "
        "lower num_draft_tokens, or raise topk or num_steps",
    ),
    Case(
        invariants.check_parents,
        ("req-3", [-1, 0, 2, 1]),
        ("req-3", [-1, 0, -1, 1]),
        invariants.TreeShapeError,
        "req-3: node 2 of 4 has parent 2, must lie in [-1, 2); all parents are [-1, 0, 2, 1]",
    ),
    Case(
        invariants.check_parents,
        ("req-3", [0, 0]),
        ("req-3", [-1, 0]),
        invariants.TreeShapeError,
        "req-3: node 0 of 2 has parent 0, must lie in [-1, 0); all parents are [0, 0]",
    ),
    Case(
        invariants.check_siblings,
        ("req-3", [-1, 0, 0, 1], [9, 5, 5, 5]),
        ("req-3", [-1, 0, 0, 1, -1], [9, 5, 6, 5, 9]),
        invariants.TreeShapeError,
        "req-3: nodes 1 and 2 of 4, children of node 0, both propose token 5, siblings must differ",
    ),
    Case(
        invariants.check_path,
        ("req-3", [0, 1, 2], [-1, 0, 0]),
        ("req-3", [0, 2], [-1, 0, 0]),
        invariants.TreeShapeError,
        "req-3: accepted nodes [0, 1, 2] are no path from the root, their parents are [-1, 0, 0]",
    ),
    Case(
        invariants.check_accepted,
        ([0, -1], 3),
        ([0, 2], 3),
        invariants.TreeShapeError,
        "accepted nodes must lie in [0, 3), they are [0, -1]",
    ),
    Case(
        invariants.check_accepted,
        ([0, 3], 3),
        ([], 3),
        invariants.TreeShapeError,
        "accepted nodes must lie in [0, 3), they are [0, 3]",
    ),
    Case(
        invariants.check_path,
        ("req-3", [], [-1, 0]),
        ("req-3", [0], [-1, 0]),
        invariants.TreeShapeError,
        "req-3: accepted nodes [] are no path from the root, their parents are []",
    ),
    Case(
        invariants.check_state_settled,
        (2, 7),
        (2, 0),
        invariants.RecurrentStateError,
        "the state of row 2 must be committed before its next forward, a verify of 7 nodes is open",
    ),
    Case(
        invariants.check_state_commit,
        (2, 7, 7),
        (2, 6, 7),
        invariants.RecurrentStateError,
        "row 2 must commit one of the 7 nodes of its open verify, got node 7",
    ),
    Case(
        invariants.check_window_pages,
        (3, 2, 7),
        (2, 2, 7),
        invariants.PoolExhaustedError,
        "3 window pages needed, 2 of 7 free: raise the window pool or lower max_running_requests",
    ),
    Case(
        invariants.check_protected,
        ("req-3", 6, 4),
        ("req-3", 8, 4),
        invariants.WindowMapError,
        "req-3: protected length 6 must be whole pages of 4 slots",
    ),
    Case(
        invariants.check_window_slide,
        ("req-3", 8, 7, 20),
        ("req-3", 8, 8, 8),
        invariants.WindowMapError,
        "req-3: evicted 8 <= committed 7 <= allocated 20 is broken: slide by the length that the host has committed",
    ),
    Case(
        invariants.check_window_mapped,
        ("req-3", [5, 6, 7], {5, 7}, 7, 4),
        ("req-3", [5, 6, 7], {6, 7}, 4, 4),
        invariants.WindowMapError,
        "req-3: page 6 of positions [4, 8) has no window page, but readers see positions from 7 on",
    ),
    Case(
        invariants.check_resident,
        ("req-3", [7, 8, 9], {7}),
        ("req-3", [7], {7}),
        invariants.ResidencyError,
        "req-3: 2 of 3 pages are not on the device, the first is page 8: bring them before the forward",
    ),
    Case(
        invariants.check_device_room,
        ("verify", 9, 8),
        ("verify", 8, 8),
        invariants.ResidencyError,
        "verify: 9 pages wanted on the device at once, it has 8: run fewer rows at a time",
    ),
    Case(
        invariants.check_device_pages,
        (3, 5, 4),
        (3, 4, 4),
        invariants.ResidencyError,
        "3 pages lie on the device and 5 on the host, 4 are held: pages that were freed kept their places",
    ),
    Case(
        invariants.check_host_capacity,
        (9, 8),
        (8, 8),
        invariants.HostCapacityError,
        "9 pages offloaded at once, the host tier has 8: raise its size, or recompute them",
    ),
    Case(
        invariants.check_host_block,
        ("host block 2", False, 3, 3),
        ("host block 2", True, 3, 3),
        invariants.HostBlockError,
        "host block 2 restored, but it was dropped or evicted: ask holds() first, or recompute it",
    ),
    Case(
        invariants.check_host_block,
        ("host block 2", True, 3, 2),
        ("host block 2", True, 2, 2),
        invariants.HostBlockError,
        "host block 2 of 3 pages restored into 2: allocate as many as were offloaded",
    ),
]
NAMES = [f"{entry.check.__name__}-{number}" for number, entry in enumerate(CASES)]


@pytest.mark.parametrize("entry", CASES, ids=NAMES)
def test_a_broken_rule_is_raised_in_these_words(entry):
    """Both sides of the equation, whose it is and the settings stand in the message, and the type is the rule's."""
    with pytest.raises(InvariantError) as caught:
        entry.check(*entry.broken)
    assert type(caught.value) is entry.error
    assert str(caught.value) == entry.words
    assert isinstance(caught.value, KVCanaryError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("entry", CASES, ids=NAMES)
def test_its_clean_twin_passes(entry):
    """The same check at the edge of what is allowed says nothing."""
    assert entry.check(*entry.clean) is None


def test_every_check_and_every_error_has_a_case():
    """No check and no type is without its words here."""
    checks = {name for name, value in vars(invariants).items() if name.startswith("check_") and callable(value)}
    errors = {v for v in vars(invariants).values() if inspect.isclass(v) and issubclass(v, InvariantError)}
    assert {entry.check.__name__ for entry in CASES} == checks
    assert {entry.error for entry in CASES} == errors - {InvariantError}


def test_no_message_ends_with_a_full_stop():
    """One sentence, and its numbers last."""
    assert [entry.words for entry in CASES if re.search(r"[.\s]$", entry.words)] == []


def raised(cases: list[Case]) -> list[str]:
    """The words of the errors that these cases raise."""
    found = []
    for entry in cases:
        try:
            entry.check(*entry.broken)
        except InvariantError as error:
            found.append(str(error))
    return found


def test_checks_are_on_without_asserts():
    """`python -O` drops every assert, and no check: the same words come out of such an interpreter."""
    script = (
        "import runpy\nassert False, 'this interpreter keeps asserts'\n"
        f"test = runpy.run_path({__file__!r})\nprint(*test['raised'](test['CASES']), sep='\\n')"
    )
    child = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines() == [entry.words for entry in CASES]
