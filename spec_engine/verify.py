"""Acceptance: how far the target's own choices follow the draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcanary.invariants import check_parents, check_path
from spec_engine.drafting.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """One request's accepted path: ``nodes`` from the root down, ``tokens`` that follow each of them.

    ``tokens[:-1]`` are the accepted drafts, ``tokens[-1]`` is the new bonus token.
    """

    nodes: list[int]
    tokens: list[int]


def accept(tree: Tree, target_tokens: Tensor, requests: Sequence[str] = ()) -> list[Accepted]:
    """Walk each tree by equality: ``target_tokens [bs, N]`` is what the target chose after each node.

    A node is accepted when it and all its ancestors are what the target chose after their parents. Siblings differ,
    so at most one child of a node matches and the accepted nodes form a path; with draws in place of argmax this is
    target-only tree sampling at thresholds 1. TreeShapeError, which names one of ``requests``, for a tree that is none.
    """
    parents = tree.parents.tolist()
    names = requests or [f"request {b} of the batch" for b in range(len(parents))]
    for name, own in zip(names, parents, strict=True):
        check_parents(name, own)
    chosen_by_parent = target_tokens.gather(1, tree.parents.clamp_min(0))
    refused = (tree.tokens != chosen_by_parent) | (tree.parents < 0)
    refused[:, 0] = False
    accepted = ~(tree.mask & refused[:, None, :]).any(-1)
    paths = zip(names, accepted.tolist(), parents, target_tokens.tolist(), strict=True)
    return [_path(*path) for path in paths]


def _path(request: str, kept: list[bool], parents: list[int], tokens: list[int]) -> Accepted:
    nodes = [node for node, is_kept in enumerate(kept) if is_kept]
    check_path(request, nodes, parents)
    return Accepted(nodes, [tokens[node] for node in nodes])
