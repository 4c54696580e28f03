"""Acceptance for a host that waits: the accepted paths as lists, and what is no path of its tree is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcanary.invariants import check_parents, check_path, check_siblings
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
        check_parents(name, own)
        check_siblings(name, own, proposed)
        check_path(name, path.nodes, own)
    return paths
