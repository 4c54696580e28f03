"""Copies: K and V that several ranks hold must be the same bits, whoever computed them (X2).

Fingerprints of what was stored are compared, not the bytes: one sum over a pool a step, which a GPU reads in
microseconds. A bit that changes later is each rank's own R9.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary.pools.views import PoolView
from kvcanary.ranks.agreement import RanksDisagreeError
from kvcanary.ranks.levels import X2, Level, Levels, Rows, digest
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import CONTENT_B


class Place(NamedTuple):
    """Where ranks hold other bits: layer of a pool, slot."""

    pool: PoolState
    layer: int
    slot: int


class Copies:
    """Of pools that ranks hold whole, and of heads that several of them hold."""

    def __init__(self, pools: Sequence[PoolState], num_ranks: int) -> None:
        own = [pool for pool in pools if is_held_by_several(pool.view, num_ranks)]
        self.pools = {f"copies of the {pool.name} pool": pool for pool in own}

    def take(self) -> list[Tensor]:
        """A sum of each pool's fingerprints [] int64, of all that was launched; null slots are padding's."""
        return [pool.expected[pool.view.null_slots :, CONTENT_B].sum() for pool in self.pools.values()]

    def levels(self, sums: Sequence[int]) -> Levels:
        """One for each share of heads, of which this rank has one; `sums`: what `take` gave."""
        found: dict[str, Level] = {}
        for (name, pool), own in zip(self.pools.items(), sums, strict=True):
            found |= by_share(name, pool.view, Level(digest({"": [own]}), partial(_fingerprints, pool), X2))
        return found

    def place_of(self, error: RanksDisagreeError) -> Place | None:
        """Where what an agreement has found lies; None: in no pool."""
        pool = next((own for name, own in self.pools.items() if error.level.startswith(name)), None)
        if pool is None or error.name is None or error.position is None:
            return None
        return Place(pool, int(error.name.rpartition(" ")[2]), error.position)


def is_held_by_several(view: PoolView, num_ranks: int) -> bool:
    """Whether another of these ranks holds the same heads, or all of them."""
    return num_ranks * view.kv_heads > view.share.whole_heads


def by_share(name: str, view: PoolView, own: Level) -> Levels:
    """A level for each share of heads: `own` of that which this rank holds, none of the others."""
    heads, share = view.kv_heads, view.share
    found: dict[str, Level] = {}
    for first in range(0, share.whole_heads, heads):
        which = "" if heads == share.whole_heads else f", heads {first} to {first + heads - 1}"
        found[name + which] = own if first == share.first_head else Level(None, dict, X2)
    return found


def _fingerprints(pool: PoolState) -> Rows:
    """By layer, that of every slot; of null slots zeros."""
    content = pool.content_a.clone()
    content[:, : pool.view.null_slots] = 0
    return {f"layer {layer}": row for layer, row in enumerate(content.tolist())}


class StateSum:
    """A running sum of keyed hidden states, which every rank has whole: all reductions of a step in one number.

    total: [] int64. A model calls it with hidden states [n, size] of a floating type; captured forwards may.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        words = size * dtype.itemsize // 4
        generator = torch.Generator().manual_seed(0)
        keys = torch.randint(-(1 << 31), 1 << 31, (words,), generator=generator, dtype=torch.int64) | 1
        self._keys = keys.to(torch.int32).to(device)  # odd: no bit of a word is lost in the product
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, hidden: Tensor) -> None:
        """Take what a forward gave."""
        words = hidden.contiguous().view(torch.int32)
        self.total += (words * self._keys).sum()

    def level(self, total: int) -> Level:
        """`total`: what it was behind the step."""
        rows = {"": [total]}
        return Level(digest(rows), lambda: rows, X2)
