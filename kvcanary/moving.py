"""Moves: what is known of slots follows the bytes that an engine has moved, and damage moves with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcanary.fingerprints import Fingerprints
from kvcanary.sites import pack_site
from kvcanary.state import CanaryState, PoolState
from kvcanary.twin import Twin
from kvcanary_kernels.move import move_torch

Pairs = list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Move:
    """A declared move; every source was read before any destination was written."""

    pool: PoolState
    pairs: Pairs  # (source, destination)
    step: int


class Mover:
    """Applies moves to twin, fingerprints and, where they are on the device already, records."""

    def __init__(self, state: CanaryState, twin: Twin, fingerprints: Fingerprints, grants: Sequence[int]) -> None:
        self._state, self._twin, self._fingerprints, self._grants = state, twin, fingerprints, grants

    def apply(self, move: Move) -> None:
        pool, base, unsealed = move.pool, move.pool.base, self._twin.unsealed
        pairs = [(source, slot) for source, slot in move.pairs if source != slot]
        if not pairs:
            return
        sealed = [(source, slot) for source, slot in pairs if base + source not in unsealed]
        if sealed:
            self._move_records(pool, sealed, move.step)
        src, dst = [source for source, _ in pairs], [slot for _, slot in pairs]
        grants = [self._grants[slot // self._state.page_size] for slot in dst]
        self._twin.move([base + slot for slot in src], [base + slot for slot in dst], grants, move.step)
        for _, slot in sealed:
            unsealed.pop(base + slot, None)
        self._fingerprints.move(pool, src, dst)

    def _move_records(self, pool: PoolState, pairs: Pairs, step: int) -> None:
        """Sources were judged before, so that they have records, and fingerprints that may still wait."""
        if self._fingerprints.waits_for(pool, (source for source, _ in pairs)):
            self._fingerprints.write()
        state = self._state
        src, dst = state.ints(source for source, _ in pairs), state.ints(slot for _, slot in pairs)
        damage = pool.records.index_select(0, src) - pool.expected.index_select(0, src)
        move_torch(
            pool.expected,
            pool.content_a,
            src,
            dst,
            generations=state.ints(self._grants[slot // state.page_size] for _, slot in pairs),
            step=state.ints((step,)),
            sites=state.ints((pack_site("move", 0),)),
            pool_id=pool.pool_id,
            keys=pool.keys,
        )
        moved = pool.expected.index_select(0, dst)
        pool.records.index_copy_(0, dst, moved + damage if bool(torch.any(damage)) else moved)
