"""Drafting with topk 1: the tree is a chain whose shape is known beforehand, so constants stand for its kernels.

No score is compared, nothing is sorted or gathered; see sgl-project/sglang#26424 for the method.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcanary.invariants import check_chain, check_chain_constants, check_chain_nodes, check_chain_views
from spec_engine.drafting.tree import INDEX_DTYPE, Tree, TreeGrowth, build_tree, parent_list_width, parents_dtype


class ChainConstants:
    """Selection, parent list and finished shape of ``max_bs`` chains of T drafts: made once for every T.

    selected [max_bs, T], parent_list [max_bs, T, or 0 when T < 2]: int64, contiguous, as `build_tree` takes them.
    T = 0 is a root alone. TreeShapeError unless num_draft_tokens is T + 1, ChainConstantsError where they are no chain.
    """

    def __init__(self, max_bs: int, num_steps: int, num_draft_tokens: int, device: torch.device | str = "cpu") -> None:
        check_chain_nodes(num_steps, num_draft_tokens)
        drafts = torch.arange(num_steps, dtype=INDEX_DTYPE, device=device)
        self.selected = drafts.repeat(max_bs, 1)
        self.parent_list = (drafts[: parent_list_width(1, num_steps)] - 1).repeat(max_bs, 1).to(parents_dtype(1))
        blank = drafts.new_zeros(max_bs, num_draft_tokens)
        self._shape = build_tree(blank, self.selected, self.parent_list, 1, num_steps)
        self._check()
        self.addresses = addresses(self._shape)

    @property
    def max_bs(self) -> int:
        """Requests that there are constants for."""
        return min(len(part) for part in (self._shape.parents, self._shape.depths, self._shape.mask))

    @property
    def num_steps(self) -> int:
        """T of their chains."""
        return self._shape.parents.shape[1] - 1

    def tree(self, tokens: Tensor) -> Tree:
        """The chains of ``tokens [bs, N]``, roots first; all else are views of the constants, not to write to."""
        bs = len(tokens)
        return Tree(tokens, self._shape.parents[:bs], self._shape.depths[:bs], self._shape.mask[:bs])

    def _check(self) -> None:
        """Of every request; waits for the device, once."""
        nodes = range(self.num_steps + 1)
        rows = [[other <= node for other in nodes] for node in nodes]
        needed = {"parents": [node - 1 for node in nodes], "depths": list(nodes), "mask": rows}
        for name, whole in needed.items():
            for found in getattr(self._shape, name).unique(dim=0).tolist():
                check_chain(name, found, whole)


class ChainGrowth:
    """`TreeGrowth` of chains: every draft survives, whatever its probability."""

    def __init__(self, constants: ChainConstants) -> None:
        self._constants = constants
        self._tokens: list[Tensor] = []
        self.made_for: Tensor | None = None

    def add(self, probs: Tensor, tokens: Tensor) -> None:
        """The draft that follows each chain, ``[bs, 1, 1]``; ``probs`` are not looked at."""
        self._tokens.append(tokens.flatten(1))

    def survive(self) -> tuple[Tensor, None]:
        """The last drafts ``[bs, 1]``; None: each is the child of the only survivor before it."""
        return self._tokens[-1], None

    def finish(self, root_tokens: Tensor, num_nodes: int) -> Tree:
        """``root_tokens [bs]`` and the drafts behind them -> a chain of ``num_nodes`` nodes."""
        tree = build_chain_tree(root_tokens, self._tokens, num_nodes, self._constants)
        return replace(tree, made_for=self.made_for)


def build_chain_tree(root_tokens: Tensor, drafts: list[Tensor], num_nodes: int, constants: ChainConstants) -> Tree:
    """A chain of N nodes a request: ``root_tokens [bs]``, then ``drafts``, one [bs, 1] a step.

    ChainConstantsError when the constants are those of another T, or of fewer requests, or are not what is used.
    """
    made_for = constants.num_steps + 1
    check_chain_constants(constants.max_bs, made_for, len(root_tokens), len(drafts), num_nodes)
    tree = constants.tree(torch.cat((root_tokens[:, None], *drafts), 1))
    check_chain_views(num_nodes, addresses(tree), constants.addresses)
    return tree


def addresses(tree: Tree) -> list[int]:
    """Where parents, depths and mask begin."""
    return [part.data_ptr() for part in (tree.parents, tree.depths, tree.mask)]


def new_growth(topk: int, bs: int, constants: ChainConstants | None = None) -> TreeGrowth | ChainGrowth:
    """What grows the trees of ``bs`` requests: by constants for a chain that they hold, else the general path."""
    if topk == 1 and constants is not None and bs <= constants.max_bs:
        return ChainGrowth(constants)
    return TreeGrowth(topk)
