"""The draft tree: which candidates survive, and how the chosen ones hang together.

Flat candidate index: 0..K-1 are the first step's tokens, then K*K a step; child k of the q-th survivor of the
step before is number q*K + k of its step. Children always come after their parents, and never score higher.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kvcanary.faults import seam
from kvcanary.invariants import check_candidates, check_tree_array

INDEX_DTYPE = torch.int64  # of chosen candidates and parent lists
MADE_FOR = 4  # columns of `Tree.made_for` at most: of proposals, and of what they were drawn from


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes 0..N-1 of each request, root (the bonus token) first, parents before children.

    tokens, parents, depths: [bs, N] int64; parents of the root and of unreachable nodes are -1.
    mask: [bs, N, N] bool, ``mask[b, n, a]``: a is n itself or an ancestor of n.

    For the host to judge, once it has collected the step:
    num_seen: [bs, N] int64, nodes in each row of the mask; None: whoever asks counts them.
    made_for: [bs, 2 or 4] int64, row and committed length for which the proposals were made that it grew from, and
        what those were drawn from, as they lie in the relay; None where it grew from none.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    num_seen: Tensor | None = None
    made_for: Tensor | None = None

    def first(self, count: int) -> Tree:
        """The trees of the first ``count`` requests."""
        parts = (getattr(self, field.name) for field in fields(self))
        return Tree(*(None if part is None else part[:count] for part in parts))


class TreeGrowth:
    """The candidates of one drafting step. Alternate: ``add`` proposals, ``survive``, forward the survivors.

    The root is a lone survivor of probability 1, so the first proposals are its K children.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.made_for: Tensor | None = None
        self.num_steps = 0
        self._scores: list[Tensor] = []  # cumulative probability of every candidate, step by step
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []  # flat index of every survivor, step by step
        self._path: Tensor | None = None  # [bs, survivors], their cumulative probability
        self._num_candidates = 0

    def add(self, probs: Tensor, tokens: Tensor) -> None:
        """K children of every survivor, ``[bs, survivors, K]`` both (one survivor, the root, the first time)."""
        scores = probs if self._path is None else self._path[:, :, None] * probs
        self._scores.append(scores.flatten(1).nan_to_num(0.0))  # a NaN would be the likeliest of all
        self._tokens.append(tokens.flatten(1))
        self.num_steps += 1

    def survive(self) -> tuple[Tensor, Tensor]:
        """The K likeliest of the last step's candidates: their tokens, and which survivor each descends from.

        A number out of range is none's: nothing is gathered by it, and no node hangs on it.
        """
        scores, tokens = self._scores[-1], self._tokens[-1]
        self._path, chosen = scores.topk(self.topk, dim=-1)
        self._parents.append(chosen + self._num_candidates)
        self._num_candidates += scores.shape[1]
        chosen = chosen.clamp(0, scores.shape[1] - 1)
        return tokens.gather(1, chosen), chosen.div(self.topk, rounding_mode="floor")

    def finish(self, root_tokens: Tensor, num_nodes: int) -> Tree:
        """Keep the root and the N-1 likeliest candidates: ``root_tokens [bs]`` -> a tree of N nodes.

        Of equally likely ones the earlier is kept, so that a parent never loses to its child.
        """
        scores, tokens = torch.cat(self._scores, 1), torch.cat(self._tokens, 1)
        check_candidates(scores.shape[1], num_nodes)
        likeliest = scores.sort(dim=-1, descending=True, stable=True).indices[:, : num_nodes - 1]
        chosen = likeliest.sort(dim=-1).values
        nodes = torch.cat((root_tokens[:, None], tokens.gather(1, chosen.clamp(0, tokens.shape[1] - 1))), 1)
        root = chosen.new_full((len(chosen), int(self.num_steps > 1)), -1)
        parent_list = torch.cat((root, *self._parents), 1).to(parents_dtype(self.topk))
        tree = build_tree(nodes, chosen, parent_list, self.topk, self.num_steps)
        return replace(tree, made_for=self.made_for)


def build_tree(nodes: Tensor, chosen: Tensor, parent_list: Tensor, topk: int, num_steps: int) -> Tree:
    """Parents, depths and ancestor mask of ``chosen [bs, N-1]``, ascending flat indices of candidates.

    parent_list [bs, K * (T - 1) + 1]: -1 for the root, then the flat index of every survivor, step by step;
    candidate c is a child of entry c // K. With T = 1 all are children of the root and the width is 0.
    An index that is out of range, or names a candidate that was not chosen or not before its child, leaves the
    node unreachable: its parent is -1, and the host refuses the tree when it collects it. TreeShapeError for other
    widths, for strides, and for narrower integers.
    """
    bs, width = len(nodes), parent_list_width(topk, num_steps)
    _check_indices("chosen", chosen, (bs, nodes.shape[1] - 1))
    _check_indices("parent_list", parent_list, (bs, width))
    none = parent_list.new_full((bs, 1), -1)
    lineage = chosen.div(topk, rounding_mode="floor")
    parent = torch.cat((none, parent_list, none), 1).gather(1, lineage.clamp(-1, width) + 1)
    found = torch.searchsorted(chosen, parent).clamp_max_(chosen.shape[1] - 1)
    earlier = found < torch.arange(chosen.shape[1], device=chosen.device)
    known = (chosen.gather(1, found) == parent) & (parent >= 0) & earlier
    parents = torch.where(known, found + 1, -1).masked_fill_(lineage == 0, 0)
    parents = torch.cat((none, parents), 1)
    mask = ancestor_mask(parents, num_steps)
    return Tree(nodes, parents, mask.sum(-1) - 1, mask)


def parents_dtype(topk: int) -> torch.dtype:
    """Of parent lists, by constants or not: their readers step by 8 bytes an entry."""
    return seam("draft.parents_dtype", INDEX_DTYPE, topk=topk)


def parent_list_width(topk: int, num_steps: int) -> int:
    """Entries of a parent list: the root and the survivors of T - 1 selections; none where all hang on the root."""
    return topk * (num_steps - 1) + 1 if num_steps > 1 else 0


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """``[bs, N]`` parents -> ``[bs, N, N]`` bool: row n holds n and its ancestors, at most ``max_depth`` up.

    Bounded, so that a corrupt tree costs acceptance and never hangs; a node whose parent is none, or no node of the
    tree, sees only itself. Ways up are counted in float64, which holds those of 1,000 levels.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    step = (parents[:, :, None] == nodes) | (nodes[:, None] == nodes)  # a node, and one up
    return torch.linalg.matrix_power(step.double(), max_depth) > 0


def _check_indices(name: str, array: Tensor, shape: tuple[int, int]) -> None:
    check_tree_array(name, array.shape, shape, str(array.dtype).removeprefix("torch."), array.is_contiguous())
