"""Drafting: branches, trees, relayed proposals, accepted paths, recurrent states and captured programs."""

from __future__ import annotations

from collections.abc import Sequence

from kvcanary.errors import InvariantError
from kvcanary.invariants.rows import MAX_FLAT_INDEX


class BranchLayoutError(InvariantError):
    """Draft branches overlap, or reach beyond what their request owns."""


def check_branch_shape(shape: Sequence[int], bs: int, topk: int, num_steps: int) -> None:
    """One slot a request, branch and step, in this order."""
    if tuple(shape) != (bs, topk, num_steps):
        raise BranchLayoutError(
            f"branch slots are {list(shape)}, {bs} requests with topk {topk} and num_steps {num_steps} "
            f"need [{bs}, {topk}, {num_steps}]"
        )


def check_branches(
    request: str, start: int, stride: int, topk: int, num_steps: int, allocated_len: int, tail: int = 0
) -> None:
    """Branch b is row positions [start + b * stride, + num_steps): apart from the others, inside what is owned.

    tail: entries of the prefix that are copied before each branch but the first, as whole pages are read.
    """
    end = start + (topk - 1) * stride + num_steps
    if (topk > 1 and stride < num_steps + tail) or end > allocated_len:
        raise BranchLayoutError(
            f"{request}: {topk} branches of {num_steps} slots from {start}, {stride} apart, end at {end}: "
            f"they must not overlap, nor the {tail} copied slots before the next one, and end by {allocated_len}, "
            "what is allocated"
        )


def check_window(request: str, start: int, num_nodes: int, allocated_len: int) -> None:
    if start + num_nodes > allocated_len:
        raise BranchLayoutError(
            f"{request}: verify window [{start}, {start + num_nodes}) of {num_nodes} nodes ends beyond the "
            f"{allocated_len} slots that are allocated"
        )


class IndexBufferError(InvariantError):
    """A forward may name more entries than its index buffer holds, or the buffer has more than 32 bits can count."""


def check_draft_indices(step: int, topk: int, num_requests: int, committed: int, size: int) -> None:
    """Every branch of draft forward ``step`` names its request's prefix and its own ``step + 1`` slots.

    committed: sum of the prefixes; size: entries of the very buffer that names them (sgl-project/sglang#27338).
    """
    needed = topk * (committed + num_requests * (step + 1))
    if not needed <= size <= MAX_FLAT_INDEX:
        raise IndexBufferError(
            f"draft[{step}]: topk {topk} * (committed {committed} + requests {num_requests} * own slots {step + 1}) = "
            f"{needed} index entries <= size {size} of its buffer < {MAX_FLAT_INDEX + 1} is broken: every branch names "
            "its request's whole prefix"
        )


def check_index_buffer(forward: str, topk: int, num_requests: int, row_width: int, num_own: int, size: int) -> None:
    """A buffer that is filled in every run holds the longest rows: of the request table, and what they write."""
    needed = topk * num_requests * (row_width + num_own)
    if not needed <= size <= MAX_FLAT_INDEX:
        raise IndexBufferError(
            f"{forward}: topk {topk} * requests {num_requests} * (row width {row_width} + own slots {num_own}) = "
            f"{needed} index entries <= size {size} of its buffer < {MAX_FLAT_INDEX + 1} is broken: every branch of "
            "every request may name a whole row"
        )


class RelayError(InvariantError):
    """A request drafts from proposals that are not its own, or not of its last step."""


def check_proposals(request: str, row: int, committed_len: int, made_for: Sequence[int]) -> None:
    """What the device took from the relay was written for this row and length; pairs of both, one for each part."""
    if list(made_for) != [row, committed_len] * (len(made_for) // 2):
        pairs = zip(made_for[::2], made_for[1::2], strict=True)
        found = ", ".join(f"row {other} at length {length}" for other, length in pairs)
        raise RelayError(
            f"{request} drafts in row {row} at length {committed_len}, but was given the proposals of {found}"
        )


def check_relay(request: str, row: int, committed_len: int, published: tuple[str, int] | None) -> None:
    """Proposals are consumed once, by the request that published them, at the length to which they belong."""
    if published != (request, committed_len):
        found = "nobody's" if published is None else f"those of {published[0]} at length {published[1]}"
        raise RelayError(f"{request} drafts at length {committed_len}, but the proposals of row {row} are {found}")


class TreeShapeError(InvariantError):
    """A draft tree is no tree, or an accepted path is no path of it."""


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
    if num_steps < 0 or num_nodes != num_steps + 1:
        raise TreeShapeError(
            f"num_draft_tokens of a chain must be num_steps + 1 = {num_steps + 1}, got {num_nodes}: topk 1 keeps every "
            "draft, and the root is one more"
        )


class ChainConstantsError(InvariantError):
    """Constants are no chain, or are used for another number of steps, or more requests, than they were made for."""


def check_chain_constants(max_bs: int, num_nodes: int, bs: int, num_drafts: int, needed_nodes: int) -> None:
    if bs > max_bs or not num_nodes == num_drafts + 1 == needed_nodes:
        raise ChainConstantsError(
            f"chain constants are those of {num_nodes - 1} steps and at most {max_bs} requests, got {num_drafts} "
            f"drafts of {bs} requests for trees of {needed_nodes} nodes: rebuild them whenever num_steps changes"
        )


def check_chain(name: str, found: Sequence[object], needed: Sequence[object]) -> None:
    """Parents, depths or mask of chain constants: node n continues node n - 1, and sees all before it."""
    if list(found) != list(needed):
        raise ChainConstantsError(
            f"{name} of a chain of {len(needed)} nodes must be {list(needed)}, got {list(found)}: each node continues "
            "the one before"
        )


def check_chain_views(num_nodes: int, used: Sequence[int], own: Sequence[int]) -> None:
    """What a chain uses begins where its constants do: parents, depths and mask, by address."""
    if list(used) != list(own):
        raise ChainConstantsError(
            f"parents, depths and mask of a chain of {num_nodes} nodes must be its constants, at {list(own)}, they lie "
            f"at {list(used)}: copies and constants of another num_steps may be stale"
        )


def check_parents(request: str, parents: Sequence[int]) -> None:
    """Parents come before their children, and -1 is the root's alone.

    It is also that of a node that nothing reaches: a parent or a candidate was out of range, or was not chosen.
    """
    for node, parent in enumerate(parents):
        if not (0 <= parent < node or (parent == -1 and node == 0)):
            allowed = f"lie in [0, {node})" if node else "be -1"
            raise TreeShapeError(
                f"{request}: node {node} of {len(parents)} has parent {parent}, must {allowed}: -1 is a node whose "
                f"candidate or parent is out of range or not chosen; all parents are {list(parents)}"
            )


def check_lineage(request: str, parents: Sequence[int], num_seen: Sequence[int]) -> None:
    """Each node sees itself and what its parent sees; ``num_seen``: nodes in each row of the mask."""
    needed: list[int] = []
    for parent in parents:
        needed.append(1 + needed[parent] if needed else 1)
    if needed != num_seen:
        raise TreeShapeError(
            f"{request}: by the mask the nodes see {list(num_seen)} nodes, by their parents {list(parents)} it must be "
            f"{needed}: themselves and their ancestors"
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


class AcceptanceError(InvariantError):
    """Tokens that leave are not the drafts that were accepted, or a tree hangs on another token than the last."""


def check_emitted(
    request: str, num_accepted: int, nodes: Sequence[int], drafted: Sequence[int], emitted: Sequence[int]
) -> None:
    """Accepted drafts are the tokens that leave, and a token of the target's own follows the last of them."""
    accepted = [drafted[node] for node in nodes[1:]]
    if not len(nodes) == num_accepted == len(emitted) or accepted != emitted[:-1] or min(emitted) < 0:
        raise AcceptanceError(
            f"{request}: {num_accepted} nodes accepted, {list(nodes)}, whose drafts {accepted} must be the tokens "
            f"emitted before the last, got {list(emitted)}"
        )


def check_root(request: str, root: int, left: int) -> None:
    if root != left:
        raise AcceptanceError(
            f"{request}: its tree was drafted behind token {root}, but the last token that left is {left}"
        )


class RecurrentStateError(InvariantError):
    """A recurrent state would go on from something else than the last accepted node of its request."""


def check_state_settled(row: int, pending: int) -> None:
    """A request's recurrent state goes on only after the verify before has said which node was accepted last."""
    if pending:
        raise RecurrentStateError(
            f"the state of row {row} must be committed before its next forward, a verify of {pending} nodes is open"
        )


def check_state_commit(row: int, node: int, pending: int) -> None:
    if not 0 <= node < pending:
        raise RecurrentStateError(
            f"row {row} must commit one of the {pending} nodes of its open verify, got node {node}"
        )


class MissingHooksError(InvariantError):
    """A program was captured with a forward that has no hooks, and a canary is there that would never see it."""


def check_hooked(forward: str, pool: str, size: int, has_hooks: bool) -> None:
    """Where there is a canary, every forward of a program for ``size`` requests has its hooks in it."""
    if not has_hooks:
        raise MissingHooksError(
            f"{forward} of the {pool} pool has no hooks in the captured program for {size} requests, the canary counts "
            "on those of every forward: make each by StaticForwards.hook()"
        )
