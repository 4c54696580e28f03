"""Acceptance: how far the target's own choices follow the draft tree."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcanary.invariants import TreeShapeError
from spec_engine.drafting.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """One request's accepted path: ``nodes`` from the root down, ``tokens`` that follow each of them.

    ``tokens[:-1]`` are the accepted drafts, ``tokens[-1]`` is the new bonus token.
    """

    nodes: list[int]
    tokens: list[int]


def accept(tree: Tree, target_tokens: Tensor) -> list[Accepted]:
    """Walk each tree by equality: ``target_tokens [bs, N]`` is what the target chose after each node.

    A node is accepted when it and all its ancestors are what the target chose after their parents. Siblings differ,
    so at most one child of a node matches and the accepted nodes form a path; with draws in place of argmax this is
    target-only tree sampling at thresholds 1.
    """
    chosen_by_parent = target_tokens.gather(1, tree.parents.clamp_min(0))
    refused = (tree.tokens != chosen_by_parent) | (tree.parents < 0)
    refused[:, 0] = False
    accepted = ~(tree.mask & refused[:, None, :]).any(-1)
    paths = zip(accepted.tolist(), tree.depths.tolist(), target_tokens.tolist(), strict=True)
    return [_path(b, kept, depths, tokens) for b, (kept, depths, tokens) in enumerate(paths)]


def _path(b: int, kept: list[bool], depths: list[int], tokens: list[int]) -> Accepted:
    nodes = [node for node, is_kept in enumerate(kept) if is_kept]
    if [depths[node] for node in nodes] != list(range(len(nodes))):
        raise TreeShapeError(
            f"request {b} of the batch: accepted nodes {nodes} have depths {[depths[n] for n in nodes]}"
        )
    return Accepted(nodes, [tokens[node] for node in nodes])
