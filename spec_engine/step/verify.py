"""Acceptance on the host: what the device tells of a drafted step, and what of it is refused before a token leaves.

A step says all of it in one table, a row for each request, so that it comes in one copy, whoever waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary.invariants import (
    check_accepted,
    check_emitted,
    check_lineage,
    check_parents,
    check_path,
    check_proposals,
    check_siblings,
)
from spec_engine.acceptance.walk import Acceptance
from spec_engine.core import Batch
from spec_engine.drafting.tree import Tree


class Owner(NamedTuple):
    """Whose tree it is; ``place``: row and committed length behind which it was drafted, None where nobody knows."""

    request: str
    place: tuple[int, int] | None = None


@dataclass(frozen=True)
class Accepted:
    """One request's accepted path: ``nodes`` from the root down, ``tokens`` that follow each of them.

    ``tokens[:-1]`` are the accepted drafts, ``tokens[-1]`` is the new bonus token; ``root`` is the one before.
    """

    nodes: list[int]
    tokens: list[int]
    root: int | None = None


def owners_of(batch: Batch) -> list[Owner]:
    """Whose trees those of a batch are, whose lengths the host knows."""
    places = zip(batch.ids, batch.requests, batch.lens, strict=True)
    return [Owner(name, (request.row, length)) for name, request, length in places]


def to_host(tree: Tree, accepted: Acceptance, owners: Sequence[Owner] = ()) -> list[Accepted]:
    """Each request's path as lists, see `accepted_of`; waits for the device."""
    rows = results_of(tree, accepted).tolist()
    owners = owners or [Owner(f"request {b} of the batch") for b in range(len(rows))]
    num_nodes, num_places = tree.tokens.shape[1], accepted.nodes.shape[1]
    return [accepted_of(row, num_nodes, num_places, own) for row, own in zip(rows, owners, strict=True)]


def results_of(tree: Tree, accepted: Acceptance) -> Tensor:
    """``[bs, columns] int64``: what the host is told of these trees, and how many accepted nodes there are first.

    Then of every node what follows it, its token, its parent and the nodes that it sees, the accepted nodes, and where
    the proposals were made that the tree grew from.
    """
    num_seen = tree.mask.sum(-1) if tree.num_seen is None else tree.num_seen
    columns = [accepted.lens[:, None], accepted.predict, tree.tokens, tree.parents, num_seen, accepted.nodes]
    return torch.cat(columns if tree.made_for is None else [*columns, tree.made_for], 1)


def accepted_of(row: list[int], num_nodes: int, num_places: int, owner: Owner) -> Accepted:
    """What a row of `results_of` says, of trees of so many nodes and paths of so many places.

    TreeShapeError for a tree that is none and for a path that is none of its tree, AcceptanceError where other tokens
    would leave than were accepted, RelayError for a tree that grew from what was proposed to another.
    """
    count, first, end = row[0], 1 + 4 * num_nodes, 1 + 4 * num_nodes + num_places
    after, tokens, parents, num_seen = (row[start : start + num_nodes] for start in range(1, first, num_nodes))
    nodes = row[first:end][: max(count, 0)]
    if owner.place is not None:
        check_proposals(owner.request, *owner.place, row[end:])
    check_tree(owner.request, parents, tokens, num_seen, nodes)
    emitted = [after[node] for node in nodes]
    check_emitted(owner.request, count, nodes, tokens, emitted)
    return Accepted(nodes, emitted, tokens[0])


def check_tree(
    request: str, parents: Sequence[int], tokens: Sequence[int], num_seen: Sequence[int], nodes: Sequence[int]
) -> None:
    """TreeShapeError where parents, mask and tokens of all nodes make no tree, and ``nodes`` no path of it."""
    check_accepted(nodes, len(parents))
    check_parents(request, parents)
    check_lineage(request, parents, num_seen)
    check_siblings(request, parents, tokens)
    check_path(request, nodes, parents)
