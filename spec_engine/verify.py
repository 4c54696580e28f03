"""Acceptance for a host that waits: the accepted paths as lists, and what is no path of its tree is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcanary.invariants import check_accepted, check_parents, check_path, check_siblings
from spec_engine.acceptance.walk import Acceptance
from spec_engine.drafting.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """One request's accepted path: ``nodes`` from the root down, ``tokens`` that follow each of them.

    ``tokens[:-1]`` are the accepted drafts, ``tokens[-1]`` is the new bonus token.
    """

    nodes: list[int]
    tokens: list[int]


def to_host(tree: Tree, accepted: Acceptance, requests: Sequence[str] = ()) -> list[Accepted]:
    """Each request's path as lists; waits for the device.

    TreeShapeError, which names one of ``requests``, for a tree that is none and for a path that is none of its tree.
    """
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    names = requests or [f"request {b} of the batch" for b in range(len(parents))]
    paths = [Accepted(*path) for path in accepted.to_lists()]
    for name, own, proposed, path in zip(names, parents, tokens, paths, strict=True):
        check_tree(name, own, proposed, path.nodes)
    return paths


def check_tree(request: str, parents: Sequence[int], tokens: Sequence[int], nodes: Sequence[int]) -> None:
    """TreeShapeError where parents and tokens of all nodes make no tree, and where ``nodes`` are no path of it."""
    check_accepted(nodes, len(parents))
    check_parents(request, parents)
    check_siblings(request, parents, tokens)
    check_path(request, nodes, parents)
