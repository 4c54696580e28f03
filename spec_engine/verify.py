"""Acceptance for a host that waits: how far the target's own choices follow the draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcanary.invariants import check_parents, check_path, check_siblings
from spec_engine.acceptance.walk import Acceptance, match
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

    TreeShapeError, which names one of ``requests``, for a tree that is none.
    """
    check_tree(tree, requests)
    num_steps = int(tree.depths.max())
    return to_host(tree, match(tree.tokens, tree.parents, target_tokens, num_steps), requests)


def check_tree(tree: Tree, requests: Sequence[str] = ()) -> None:
    """TreeShapeError where parents do not come before children, or siblings propose one token."""
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    for name, own, proposed in zip(_names(requests, len(parents)), parents, tokens, strict=True):
        check_parents(name, own)
        check_siblings(name, own, proposed)


def to_host(tree: Tree, accepted: Acceptance, requests: Sequence[str] = ()) -> list[Accepted]:
    """Each request's path as lists; TreeShapeError where it is no path of its tree."""
    parents = tree.parents.tolist()
    paths = [Accepted(nodes, tokens) for nodes, tokens in accepted.to_lists()]
    for name, own, path in zip(_names(requests, len(parents)), parents, paths, strict=True):
        check_path(name, path.nodes, own)
    return paths


def _names(requests: Sequence[str], bs: int) -> Sequence[str]:
    return requests or [f"request {b} of the batch" for b in range(bs)]
