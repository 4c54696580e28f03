"""Walks down a draft tree: each step goes to the first child that is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.faults import seam
from kvcanary.invariants import check_accepted

NO_TOKEN = -1  # of a node that the walk did not visit


@dataclass(frozen=True, eq=False)
class Acceptance:
    """What a verify forward accepted, and what follows.

    nodes: [bs, T + 1] int64, accepted nodes from the root down, then the request's own root 0 as padding.
    lens: [bs] int64 in [1, T + 1], how many of them are meant.
    predict: [bs, N] int64, the token that follows each accepted node; other nodes hold anything, or NO_TOKEN.
    """

    nodes: Tensor
    lens: Tensor
    predict: Tensor

    @property
    def tokens(self) -> Tensor:
        """[bs, T + 1] int64: accepted drafts, then the bonus token; padding repeats the first."""
        return self.predict.gather(1, self.nodes)

    @property
    def is_live(self) -> Tensor:
        """[bs, T + 1] bool: no padding."""
        return torch.arange(self.nodes.shape[1], device=self.nodes.device) < self.lens[:, None]

    @property
    def bonus(self) -> Tensor:
        """[bs] int64, the last token of each: the root of the next tree."""
        return self.predict.gather(1, last_nodes(self.nodes, self.lens)).squeeze(1)

    def to_lists(self) -> list[tuple[list[int], list[int]]]:
        """(nodes, tokens) of each request without padding; waits for the device.

        TreeShapeError for a node that is none of the tree.
        """
        rows = zip(self.nodes.tolist(), self.lens.tolist(), self.predict.tolist(), strict=True)
        return [_followed(nodes[:length], after) for nodes, length, after in rows]


def _followed(nodes: list[int], after: list[int]) -> tuple[list[int], list[int]]:
    check_accepted(nodes, len(after))
    return nodes, [after[node] for node in nodes]


def match(tokens: Tensor, parents: Tensor, chosen: Tensor, num_steps: int) -> Acceptance:
    """Accept drafts that are what the target chose: ``tokens, parents, chosen [bs, N] int64``.

    chosen: what follows each node, by argmax or by the node's own seeded draw. With draws the output is that of plain
    decoding with the same coins, whatever was drafted.
    """
    walk = match_on_host if tokens.device.type == "cpu" else match_on_device
    return seam("draft.child_not_chosen", walk(tokens, parents, chosen, num_steps), parents=parents)


def match_chain(tokens: Tensor, chosen: Tensor) -> Acceptance:
    """`match` of trees that are known to be chains, whose node n continues node n - 1, without a look at the device."""
    is_met = (tokens[:, 1:] == chosen[:, :-1]).cumprod(1)
    lens = is_met.sum(1) + 1
    ids = torch.arange(tokens.shape[1], device=tokens.device)
    return Acceptance(torch.where(ids < lens[:, None], ids, 0), lens, chosen)


def match_on_device(tokens: Tensor, parents: Tensor, chosen: Tensor, num_steps: int) -> Acceptance:
    """`match` without a look at the device, in few launches: a node is met if it and all above it are what was chosen.

    Twins cannot both be, so the nodes that are met are one path from the root, in ascending order.
    """
    bs, num_nodes = tokens.shape
    ids = torch.arange(num_nodes, device=tokens.device)
    parents = sound_parents(tokens, parents)
    above = parents.clamp_min(0)
    is_met = (ids == 0) | (parents >= 0) & (tokens == chosen.gather(1, above))
    for _ in range((num_nodes - 1).bit_length()):  # twice as far up each time
        is_met = is_met & is_met.gather(1, above)
        above = above.gather(1, above)
    spare = num_steps + 1  # a column that is cut off takes all others
    places = torch.where(is_met, is_met.cumsum(1) - 1, spare).clamp_max(spare)
    nodes = parents.new_zeros(bs, spare + 1).scatter_(1, places, ids.expand(bs, -1))[:, :spare]
    return Acceptance(nodes, is_met.sum(1).clamp_max(spare), chosen)


def match_on_host(tokens: Tensor, parents: Tensor, chosen: Tensor, num_steps: int) -> Acceptance:
    """`match` where the host need not wait to look: one pass over each tree, a tenth of the other's time.

    Nodes come after their parents, so whatever goes on from the path's end is met behind it, its twins after it.
    """
    paths = []
    for own, above, after in zip(tokens.tolist(), parents.tolist(), chosen.tolist(), strict=True):
        path = [0]
        for node in range(1, len(own)):
            end = path[-1]
            if above[node] == end and own[node] == after[end] and len(path) <= num_steps:
                path.append(node)
        paths.append(path)
    nodes = torch.tensor([path + [0] * (num_steps + 1 - len(path)) for path in paths])
    return Acceptance(nodes, torch.tensor([len(path) for path in paths]), chosen)


def single(chosen: Tensor) -> Acceptance:
    """A forward without drafts: ``chosen [bs, 1] int64`` follows, and that is all."""
    nodes = torch.zeros_like(chosen)
    return Acceptance(nodes, torch.ones_like(chosen[:, 0]), chosen)


def sound_parents(tokens: Tensor, parents: Tensor) -> Tensor:
    """``[bs, N]`` parents with -1 for every node that no walk may reach: parent not before it, or an earlier twin.

    A walk over them only ever goes to higher nodes, so a tree that is none costs accepted tokens and never hangs; of
    siblings with one token the first counts, and its probability counts once.
    """
    ids = torch.arange(parents.shape[1], device=parents.device)
    parents = torch.where((parents >= 0) & (parents < ids), parents, -1)
    same = (parents[:, :, None] == parents[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
    has_twin = (same & (ids < ids[:, None])).any(-1)
    return parents.masked_fill(has_twin, -1)


def descend(parents: Tensor, num_steps: int, accepts: Callable[[int, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Nodes [bs, T + 1] and lens [bs] of a walk of at most ``num_steps`` levels over sound ``parents [bs, N]``.

    ``accepts(depth, node [bs, 1], children [bs, N] bool) -> [bs, N] bool`` says which children may be gone to; the
    first of them, in ascending order, is. All requests walk in step, whatever the device has decided for each.
    """
    node = parents.new_zeros((len(parents), 1))
    going = torch.ones_like(node, dtype=torch.bool)
    nodes, lens = [node], torch.ones_like(node)
    for depth in range(num_steps):
        children = (parents == node) & going
        accepted = accepts(depth, node, children) & children
        going = accepted.any(1, keepdim=True)
        node = torch.where(going, accepted.int().argmax(1, keepdim=True), node)
        nodes.append(torch.where(going, node, 0))
        lens = lens + going
    return torch.cat(nodes, 1), lens.squeeze(1)


def last_nodes(nodes: Tensor, lens: Tensor) -> Tensor:
    """The deepest accepted node of each request: [bs, 1] int64."""
    return nodes.gather(1, lens[:, None] - 1)


def follow(tokens: Tensor, nodes: Tensor, lens: Tensor, bonus: Tensor) -> Acceptance:
    """An acceptance whose accepted drafts are the tree's own: ``tokens [bs, N]``, ``bonus [bs]``."""
    bs, num_nodes = tokens.shape
    levels = torch.arange(1, nodes.shape[1], device=nodes.device)
    spare = torch.full_like(levels, num_nodes)  # padding writes into a column that is cut off
    source = torch.where(levels < lens[:, None], nodes[:, :-1], spare)
    predict = tokens.new_full((bs, num_nodes + 1), NO_TOKEN)
    predict.scatter_(1, source, tokens.gather(1, nodes[:, 1:]))
    predict.scatter_(1, last_nodes(nodes, lens), bonus[:, None])
    return Acceptance(nodes, lens, predict[:, :num_nodes].contiguous())
