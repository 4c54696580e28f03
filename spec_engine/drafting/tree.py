"""The draft tree: which candidates survive, and how the chosen ones hang together.

Flat candidate index: 0..K-1 are the first step's tokens, then K*K a step; child k of the q-th survivor of the
step before is number q*K + k of its step. Children always come after their parents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.invariants import check_candidates


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes 0..N-1 of each request, root (the bonus token) first, parents before children.

    tokens, parents, depths: [bs, N] int64; parents of the root and of unreachable nodes are -1.
    mask: [bs, N, N] bool, ``mask[b, n, a]``: a is n itself or an ancestor of n.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor


class TreeGrowth:
    """The candidates of one drafting step. Alternate: ``add`` proposals, ``survive``, forward the survivors.

    The root is a lone survivor of probability 1, so the first proposals are its K children.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.num_steps = 0
        self._scores: list[Tensor] = []  # cumulative probability of every candidate, step by step
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []  # flat index of every survivor, step by step
        self._path: Tensor | None = None  # [bs, survivors], their cumulative probability
        self._num_candidates = 0

    def add(self, probs: Tensor, tokens: Tensor) -> None:
        """K children of every survivor, ``[bs, survivors, K]`` both (one survivor, the root, the first time)."""
        scores = probs if self._path is None else self._path[:, :, None] * probs
        self._scores.append(scores.flatten(1))
        self._tokens.append(tokens.flatten(1))
        self.num_steps += 1

    def survive(self) -> tuple[Tensor, Tensor]:
        """The K likeliest of the last step's candidates: their tokens, and which survivor each descends from."""
        scores, tokens = self._scores[-1], self._tokens[-1]
        self._path, chosen = scores.topk(self.topk, dim=-1)
        self._parents.append(chosen + self._num_candidates)
        self._num_candidates += scores.shape[1]
        return tokens.gather(1, chosen), chosen.div(self.topk, rounding_mode="floor")

    def finish(self, root_tokens: Tensor, num_nodes: int) -> Tree:
        """Keep the root and the N-1 likeliest candidates: ``root_tokens [bs]`` -> a tree of N nodes."""
        scores, tokens = torch.cat(self._scores, 1), torch.cat(self._tokens, 1)
        check_candidates(scores.shape[1], num_nodes)
        chosen = scores.topk(num_nodes - 1, dim=-1).indices.sort(-1).values
        nodes = torch.cat((root_tokens[:, None], tokens.gather(1, chosen)), 1)
        no_parent = chosen.new_full((len(chosen), 1), -1)
        parent_list = torch.cat((no_parent, *self._parents), 1)
        return build_tree(nodes, chosen, parent_list, self.topk, self.num_steps)


def build_tree(nodes: Tensor, chosen: Tensor, parent_list: Tensor, topk: int, num_steps: int) -> Tree:
    """Parents, depths and ancestor mask of ``chosen [bs, N-1]``, ascending flat indices of candidates.

    parent_list [bs, K * (T - 1) + 1]: -1 for the root, then the flat index of every survivor, step by step;
    candidate c is a child of entry c // K. A parent that was not chosen itself leaves its child unreachable.
    """
    lineage = chosen.div(topk, rounding_mode="floor")
    parent = parent_list.gather(1, lineage)
    found = torch.searchsorted(chosen, parent).clamp_max_(chosen.shape[1] - 1)
    known = chosen.gather(1, found) == parent
    parents = torch.where(known, found + 1, -1).masked_fill_(lineage == 0, 0)
    parents = torch.cat((parents.new_full((len(parents), 1), -1), parents), 1)
    mask = ancestor_mask(parents, num_steps)
    return Tree(nodes, parents, mask.sum(-1) - 1, mask)


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """``[bs, N]`` parents -> ``[bs, N, N]`` bool: row n holds n and its ancestors, at most ``max_depth`` up.

    Bounded, so that a corrupt tree costs acceptance and never hangs; a node without a parent sees only itself.
    """
    num_nodes = parents.shape[1]
    own = torch.eye(num_nodes, dtype=torch.bool, device=parents.device)
    step = (parents[:, :, None] == torch.arange(num_nodes, device=parents.device)) | own
    up = parents.clamp_min(0)[:, :, None].expand(-1, -1, num_nodes)
    orphan = (parents < 0)[:, :, None]
    mask = step
    for _ in range(max_depth - 1):
        mask = step | (mask.gather(1, up) & ~orphan)
    return mask
