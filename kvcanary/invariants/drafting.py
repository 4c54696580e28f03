"""Drafting: branches, trees, relayed proposals, accepted paths and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

from kvcanary.invariants.errors import (
    BranchLayoutError,
    ChainConstantsError,
    IndexBufferError,
    RecurrentStateError,
    RelayError,
    StagingError,
    TreeShapeError,
)
from kvcanary.invariants.sizes import MAX_FLAT_INDEX


def check_branch_shape(shape: Sequence[int], bs: int, topk: int, num_steps: int) -> None:
    """One slot a request, branch and step, in this order."""
    if tuple(shape) != (bs, topk, num_steps):
        raise BranchLayoutError(
            f"branch slots are {list(shape)}, {bs} requests with topk {topk} and num_steps {num_steps} "
            f"need [{bs}, {topk}, {num_steps}]"
        )


def check_branches(request: str, start: int, stride: int, topk: int, num_steps: int, allocated_len: int) -> None:
    """Branch b is row positions [start + b * stride, + num_steps): apart from the others, inside what is owned."""
    end = start + (topk - 1) * stride + num_steps
    if (topk > 1 and stride < num_steps) or end > allocated_len:
        raise BranchLayoutError(
            f"{request}: {topk} branches of {num_steps} slots from {start}, {stride} apart, end at {end}: "
            f"they must not overlap and end by {allocated_len}, what is allocated"
        )


def check_window(request: str, start: int, num_nodes: int, allocated_len: int) -> None:
    if start + num_nodes > allocated_len:
        raise BranchLayoutError(
            f"{request}: verify window [{start}, {start + num_nodes}) of {num_nodes} nodes ends beyond the "
            f"{allocated_len} slots that are allocated"
        )


def check_draft_indices(lens: Sequence[int], topk: int, step: int, width: int) -> None:
    """Every branch of draft forward ``step`` names its request's prefix and its own ``step + 1`` slots.

    lens: committed lengths; width: entries of the index buffer's row, which must count every branch's prefix
    (sgl-project/sglang#27338).
    """
    needed = topk * sum(lens) + len(lens) * topk * (step + 1)
    if not needed <= width <= MAX_FLAT_INDEX:
        raise IndexBufferError(
            f"draft[{step}]: topk {topk} * committed {sum(lens)} + requests {len(lens)} * topk {topk} * own slots "
            f"{step + 1} = {needed} index entries <= row width {width} < {MAX_FLAT_INDEX + 1} is broken: the width is "
            "max_running_requests * topk * columns of a request-table row"
        )


def check_relay(request: str, row: int, committed_len: int, published: tuple[str, int] | None) -> None:
    """Proposals are consumed once, by the request that published them, at the length to which they belong."""
    if published != (request, committed_len):
        found = "nobody's" if published is None else f"those of {published[0]} at length {published[1]}"
        raise RelayError(f"{request} drafts at length {committed_len}, but the proposals of row {row} are {found}")


def check_staging(buffer: str, generation: int, now: int, count: int) -> None:
    """What the host reads of a buffer is what was copied there for it, not what the next step has put over it."""
    if generation != now:
        raise StagingError(
            f"host buffer {buffer!r} is read for its use {generation}, it is in its use {now}: a ring of {count} "
            "buffers is too short for the steps that the host is behind"
        )


def check_candidates(num_candidates: int, num_nodes: int) -> None:
    if not 1 <= num_nodes - 1 <= num_candidates:
        raise TreeShapeError(
            f"a tree of {num_nodes} nodes needs {num_nodes - 1} candidates beside its root, has {num_candidates}: "
            "lower num_draft_tokens, or raise topk or num_steps"
        )


def check_tree_array(name: str, found: Sequence[int], needed: Sequence[int], dtype: str, is_contiguous: bool) -> None:
    """Chosen candidates and parent lists are dense 64-bit integers of the shape that K, T and N make."""
    if tuple(found) != tuple(needed) or dtype != "int64" or not is_contiguous:
        strides = "contiguous" if is_contiguous else "strided"
        raise TreeShapeError(
            f"{name} must be contiguous int64 {list(needed)}, got {strides} {dtype} {list(found)}: its readers step by "
            "8 bytes an entry, topk and num_steps make the width"
        )


def check_chain_nodes(num_steps: int, num_nodes: int) -> None:
    """With topk 1 every candidate is kept."""
    if num_steps < 0 or num_nodes != num_steps + 1:
        raise TreeShapeError(
            f"num_draft_tokens of a chain must be num_steps + 1 = {num_steps + 1}, got {num_nodes}: topk 1 keeps every "
            "draft, and the root is one more"
        )


def check_chain_constants(max_bs: int, num_nodes: int, bs: int, num_drafts: int, needed_nodes: int) -> None:
    """Constants fit the batch they are used for, and the steps that were drafted."""
    if bs > max_bs or not num_nodes == num_drafts + 1 == needed_nodes:
        raise ChainConstantsError(
            f"chain constants are those of {num_nodes - 1} steps and at most {max_bs} requests, got {num_drafts} "
            f"drafts of {bs} requests for trees of {needed_nodes} nodes: rebuild them whenever num_steps changes"
        )


def check_parents(request: str, parents: Sequence[int]) -> None:
    """Parents come before their children; -1 is the root's, and that of a node that nothing reaches."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise TreeShapeError(
                f"{request}: node {node} of {len(parents)} has parent {parent}, must lie in [-1, {node}); "
                f"all parents are {list(parents)}"
            )


def check_siblings(request: str, parents: Sequence[int], tokens: Sequence[int]) -> None:
    """Children of one node propose different tokens; the mass of one proposed twice would count twice."""
    first: dict[tuple[int, int], int] = {}
    for node, proposal in enumerate(zip(parents, tokens, strict=True)):
        twin = first.setdefault(proposal, node)
        if twin != node and proposal[0] >= 0:
            raise TreeShapeError(
                f"{request}: nodes {twin} and {node} of {len(parents)}, children of node {proposal[0]}, both propose "
                f"token {proposal[1]}, siblings must differ"
            )


def check_accepted(nodes: Sequence[int], num_nodes: int) -> None:
    """Accepted nodes are nodes of the tree, before anything is gathered by them."""
    if nodes and not 0 <= min(nodes) <= max(nodes) < num_nodes:
        raise TreeShapeError(f"accepted nodes must lie in [0, {num_nodes}), they are {list(nodes)}")


def check_path(request: str, nodes: Sequence[int], parents: Sequence[int]) -> None:
    """Accepted nodes lead from the root down, each the child of the one before."""
    found = [parents[node] for node in nodes]
    if not nodes or nodes[0] != 0 or found[1:] != list(nodes[:-1]):
        raise TreeShapeError(
            f"{request}: accepted nodes {list(nodes)} are no path from the root, their parents are {found}"
        )


def check_state_settled(row: int, pending: int) -> None:
    """A request's recurrent state goes on only after the verify before has said which node was accepted last."""
    if pending:
        raise RecurrentStateError(
            f"the state of row {row} must be committed before its next forward, a verify of {pending} nodes is open"
        )


def check_state_commit(row: int, node: int, pending: int) -> None:
    """The committed node is one of the row's open verify; each verify is committed once."""
    if not 0 <= node < pending:
        raise RecurrentStateError(
            f"row {row} must commit one of the {pending} nodes of its open verify, got node {node}"
        )
