"""Moves: records follow the bytes that an engine has moved, and damage moves with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcanary.mirror import CHAIN, LAYERS_HIGH, LAYERS_LOW, OWNER, TOKEN_POSITION, Mirror, Written
from kvcanary.sites import pack_site
from kvcanary.staging import Stage
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels.record import CONTENT_B, MASK_32


class Mover:
    """Applies declared moves to records and fingerprints."""

    def __init__(self, state: CanaryState, mirror: Mirror, grants: Sequence[int]) -> None:
        self._state, self._mirror, self._grants = state, mirror, grants

    def apply(self, pool: PoolState, stage: Stage, src: Sequence[int], dst: Sequence[int], step: int) -> None:
        """Every source was read before any destination was written; `src` and `dst` are slots, each distinct."""
        pairs = [(source, slot) for source, slot in zip(src, dst, strict=True) if source != slot]
        if not pairs:
            return
        state = self._state
        sources, slots = [source for source, _ in pairs], [slot for _, slot in pairs]
        from_rows, to_rows = state.ints(sources), state.ints(slots)
        found, expected = pool.records.index_select(0, from_rows), pool.expected.index_select(0, from_rows)
        content_a = None if stage.move(sources, slots) else pool.content_a.index_select(1, from_rows)
        self._mirror.write({pool.base + slot: self._moved(pool, source, slot, step) for source, slot in pairs})
        if content_a is not None:
            self._mirror.flush()
            self._move_fingerprints(pool, to_rows, content_a, expected)
        if not torch.equal(found, expected):
            self._mirror.flush()
            damage = found - expected  # a damaged source stays damaged
            pool.records.index_copy_(0, to_rows, pool.records.index_select(0, to_rows) + damage)

    def _moved(self, pool: PoolState, source: int, slot: int, step: int) -> Written:
        """Token, position, chain and layers of the source under the grant of the destination's page."""
        was = self._mirror.written.get(pool.base + source)
        when = step & MASK_32 | pack_site("move", 0) << 32
        if was is None:
            was = (0,) * 8
        size, grants = self._state.page_size, self._grants
        stale = was[OWNER] >> 32 != grants[source // size]
        owner = was[OWNER] & MASK_32 | (0 if stale else grants[slot // size]) << 32  # a move makes nothing current
        return was[TOKEN_POSITION], was[CHAIN], owner, when, 0, was[LAYERS_LOW], was[LAYERS_HIGH], pool.seal_term

    def _move_fingerprints(self, pool: PoolState, to_rows: Tensor, content_a: Tensor, expected: Tensor) -> None:
        pool.content_a.index_copy_(1, to_rows, content_a)
        content_b = expected.select(1, CONTENT_B)
        pool.records.select(1, CONTENT_B).index_copy_(0, to_rows, content_b)
        pool.expected.select(1, CONTENT_B).index_copy_(0, to_rows, content_b)
