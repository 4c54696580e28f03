"""Branches, trees, states and captured programs that no drafting step has.

Each case: a check, arguments that break its rule, arguments that just do not, the type, the words.
"""

from kvcanary import invariants

CASES = [
    (
        invariants.check_branch_shape,
        ([2, 5, 4], 2, 4, 5),
        ([2, 4, 5], 2, 4, 5),
        invariants.BranchLayoutError,
        "branch slots are [2, 5, 4], 2 requests with topk 4 and num_steps 5 need [2, 4, 5]",
    ),
    (
        invariants.check_branches,
        ("req-3", 7, 8, 2, 3, 17),
        ("req-3", 7, 8, 2, 3, 18),
        invariants.BranchLayoutError,
        "req-3: 2 branches of 3 slots from 7, 8 apart, end at 18: they must not overlap, nor the 0 copied slots before "
        "the next one, and end by 17, what is allocated",
    ),
    (
        invariants.check_branches,
        ("req-3", 7, 2, 2, 3, 40),
        ("req-3", 7, 3, 2, 3, 40),
        invariants.BranchLayoutError,
        "req-3: 2 branches of 3 slots from 7, 2 apart, end at 12: they must not overlap, nor the 0 copied slots before "
        "the next one, and end by 40, what is allocated",
    ),
    (
        invariants.check_branches,
        ("req-3", 7, 4, 2, 3, 40, 2),
        ("req-3", 7, 5, 2, 3, 40, 2),
        invariants.BranchLayoutError,
        "req-3: 2 branches of 3 slots from 7, 4 apart, end at 14: they must not overlap, nor the 2 copied slots before "
        "the next one, and end by 40, what is allocated",
    ),
    (
        invariants.check_window,
        ("req-3", 7, 4, 10),
        ("req-3", 7, 4, 11),
        invariants.BranchLayoutError,
        "req-3: verify window [7, 11) of 4 nodes ends beyond the 10 slots that are allocated",
    ),
    (
        invariants.check_draft_indices,
        (2, 2, 4, 100, 223),
        (2, 2, 4, 100, 224),
        invariants.IndexBufferError,
        "draft[2]: topk 2 * (committed 100 + requests 4 * own slots 3) = 224 index entries <= size 223 of its buffer < "
        "2147483648 is broken: every branch names its request's whole prefix",
    ),
    (
        invariants.check_draft_indices,
        (0, 1, 1, 5, 1 << 31),
        (0, 1, 1, 5, (1 << 31) - 1),
        invariants.IndexBufferError,
        "draft[0]: topk 1 * (committed 5 + requests 1 * own slots 1) = 6 index entries <= size 2147483648 of its "
        "buffer < 2147483648 is broken: every branch names its request's whole prefix",
    ),
    (
        invariants.check_index_buffer,
        ("draft[1]", 2, 4, 50, 2, 415),
        ("draft[1]", 2, 4, 50, 2, 416),
        invariants.IndexBufferError,
        "draft[1]: topk 2 * requests 4 * (row width 50 + own slots 2) = 416 index entries <= size 415 of its buffer < "
        "2147483648 is broken: every branch of every request may name a whole row",
    ),
    (
        invariants.check_proposals,
        ("req-3", 2, 20, [1, 20]),
        ("req-3", 2, 20, [2, 20, 2, 20]),
        invariants.RelayError,
        "req-3 drafts in row 2 at length 20, but was given the proposals of row 1 at length 20",
    ),
    (
        invariants.check_proposals,
        ("req-3", 2, 20, [2, 20, 2, 17]),
        ("req-3", 2, 20, []),
        invariants.RelayError,
        "req-3 drafts in row 2 at length 20, but was given the proposals of row 2 at length 20, row 2 at length 17",
    ),
    (
        invariants.check_relay,
        ("req-3", 2, 20, ("req-1", 20)),
        ("req-3", 2, 20, ("req-3", 20)),
        invariants.RelayError,
        "req-3 drafts at length 20, but the proposals of row 2 are those of req-1 at length 20",
    ),
    (
        invariants.check_relay,
        ("req-3", 2, 20, None),
        ("req-3", 2, 21, ("req-3", 21)),
        invariants.RelayError,
        "req-3 drafts at length 20, but the proposals of row 2 are nobody's",
    ),
    (
        invariants.check_chain,
        ("parents", [-1, -1, 0], [-1, 0, 1]),
        ("parents", [-1, 0, 1], [-1, 0, 1]),
        invariants.ChainConstantsError,
        "parents of a chain of 3 nodes must be [-1, 0, 1], got [-1, -1, 0]: each node continues the one before",
    ),
    (
        invariants.check_chain_views,
        (3, [64, 128, 512], [64, 128, 256]),
        (3, [64, 128, 256], [64, 128, 256]),
        invariants.ChainConstantsError,
        "parents, depths and mask of a chain of 3 nodes must be its constants, at [64, 128, 256], they lie at "
        "[64, 128, 512]: copies and constants of another num_steps may be stale",
    ),
    (
        invariants.check_tree_array,
        ("parent list", (2, 5), (2, 5), "int32", True),
        ("parent list", (2, 5), (2, 5), "int64", True),
        invariants.TreeShapeError,
        "parent list must be contiguous int64 [2, 5], got contiguous int32 [2, 5]: its readers step by "
        "8 bytes an entry, topk and num_steps make the width",
    ),
    (
        invariants.check_chain_nodes,
        (3, 5),
        (3, 4),
        invariants.TreeShapeError,
        "num_draft_tokens of a chain must be num_steps + 1 = 4, got 5: topk 1 keeps every draft, "
        "and the root is one more",
    ),
    (
        invariants.check_chain_constants,
        (8, 4, 9, 3, 4),
        (8, 4, 8, 3, 4),
        invariants.ChainConstantsError,
        "chain constants are those of 3 steps and at most 8 requests, got 3 drafts of 9 requests for trees of 4 nodes: "
        "rebuild them whenever num_steps changes",
    ),
    (
        invariants.check_candidates,
        (4, 6),
        (4, 5),
        invariants.TreeShapeError,
        "a tree of 6 nodes needs 5 candidates beside its root, has 4: "
        "lower num_draft_tokens, or raise topk or num_steps",
    ),
    (
        invariants.check_parents,
        ("req-3", [-1, 0, 2, 1]),
        ("req-3", [-1, 0, 1, 1]),
        invariants.TreeShapeError,
        "req-3: node 2 of 4 has parent 2, must lie in [0, 2): -1 is a node whose candidate or parent is out of range "
        "or not chosen; all parents are [-1, 0, 2, 1]",
    ),
    (
        invariants.check_parents,
        ("req-3", [-1, 0, -1]),
        ("req-3", [-1, 0, 0]),
        invariants.TreeShapeError,
        "req-3: node 2 of 3 has parent -1, must lie in [0, 2): -1 is a node whose candidate or parent is out of range "
        "or not chosen; all parents are [-1, 0, -1]",
    ),
    (
        invariants.check_parents,
        ("req-3", [0, 0]),
        ("req-3", [-1, 0]),
        invariants.TreeShapeError,
        "req-3: node 0 of 2 has parent 0, must be -1: -1 is a node whose candidate or parent is out of range or not "
        "chosen; all parents are [0, 0]",
    ),
    (
        invariants.check_lineage,
        ("req-3", [-1, 0, 1], [1, 2, 2]),
        ("req-3", [-1, 0, 1], [1, 2, 3]),
        invariants.TreeShapeError,
        "req-3: by the mask the nodes see [1, 2, 2] nodes, by their parents [-1, 0, 1] it must be [1, 2, 3]: "
        "themselves and their ancestors",
    ),
    (
        invariants.check_siblings,
        ("req-3", [-1, 0, 0, 1], [9, 5, 5, 5]),
        ("req-3", [-1, 0, 0, 1, -1], [9, 5, 6, 5, 9]),
        invariants.TreeShapeError,
        "req-3: nodes 1 and 2 of 4, children of node 0, both propose token 5, siblings must differ",
    ),
    (
        invariants.check_path,
        ("req-3", [0, 1, 2], [-1, 0, 0]),
        ("req-3", [0, 2], [-1, 0, 0]),
        invariants.TreeShapeError,
        "req-3: accepted nodes [0, 1, 2] are no path from the root, their parents are [-1, 0, 0]",
    ),
    (
        invariants.check_accepted,
        ([0, -1], 3),
        ([0, 2], 3),
        invariants.TreeShapeError,
        "accepted nodes must lie in [0, 3), they are [0, -1]",
    ),
    (
        invariants.check_accepted,
        ([0, 3], 3),
        ([], 3),
        invariants.TreeShapeError,
        "accepted nodes must lie in [0, 3), they are [0, 3]",
    ),
    (
        invariants.check_path,
        ("req-3", [], [-1, 0]),
        ("req-3", [0], [-1, 0]),
        invariants.TreeShapeError,
        "req-3: accepted nodes [] are no path from the root, their parents are []",
    ),
    (
        invariants.check_emitted,
        ("req-3", 2, [0, 2], [9, 4, 5], [4, 7]),
        ("req-3", 2, [0, 2], [9, 4, 5], [5, 7]),
        invariants.AcceptanceError,
        "req-3: 2 nodes accepted, [0, 2], whose drafts [5] must be the tokens emitted before the last, got [4, 7]",
    ),
    (
        invariants.check_emitted,
        ("req-3", 3, [0, 2], [9, 4, 5], [5, 7]),
        ("req-3", 1, [0], [9, 4, 5], [0]),
        invariants.AcceptanceError,
        "req-3: 3 nodes accepted, [0, 2], whose drafts [5] must be the tokens emitted before the last, got [5, 7]",
    ),
    (
        invariants.check_emitted,
        ("req-3", 1, [0], [9], [-1]),
        ("req-3", 1, [0], [9], [0]),
        invariants.AcceptanceError,
        "req-3: 1 nodes accepted, [0], whose drafts [] must be the tokens emitted before the last, got [-1]",
    ),
    (
        invariants.check_root,
        ("req-3", 9, 7),
        ("req-3", 7, 7),
        invariants.AcceptanceError,
        "req-3: its tree was drafted behind token 9, but the last token that left is 7",
    ),
    (
        invariants.check_state_settled,
        (2, 7),
        (2, 0),
        invariants.RecurrentStateError,
        "the state of row 2 must be committed before its next forward, a verify of 7 nodes is open",
    ),
    (
        invariants.check_state_commit,
        (2, 7, 7),
        (2, 6, 7),
        invariants.RecurrentStateError,
        "row 2 must commit one of the 7 nodes of its open verify, got node 7",
    ),
    (
        invariants.check_hooked,
        ("draft[1]", "draft", 4, False),
        ("draft[1]", "draft", 4, True),
        invariants.MissingHooksError,
        "draft[1] of the draft pool has no hooks in the captured program for 4 requests, the canary counts on those of "
        "every forward: make each by StaticForwards.hook()",
    ),
]
