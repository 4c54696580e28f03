"""Moves: records follow the bytes that an engine has moved, damage moves with them, and what arrived is read again."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.hits import Hit
from kvcanary.lanes import lane_a_of_slots
from kvcanary.ledger import Ledger
from kvcanary.mirror import Mirror, Words, two_words
from kvcanary.sites import pack_site
from kvcanary.staging import Stage
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels.record import CONTENT_B, MASK_32, REQUEST_GENERATION, SEAL, STEP_SITE, TOKEN_POSITION

Slots = NDArray[np.int64]


class Mover:
    """Applies declared moves to records and fingerprints, within a pool or from one to another."""

    def __init__(self, state: CanaryState, mirror: Mirror, ledger: Ledger, compares_content: bool) -> None:
        self._state, self._mirror, self._ledger = state, mirror, ledger
        self._compares_content = compares_content

    def apply(self, source: Stage, stage: Stage, src: Slots, dst: Slots, step: int, has_lanes: bool) -> list[Hit]:
        """T1 where bytes that arrived are not those that were written at the source.

        Every source was read before any destination was written; `src` and `dst` are slots, `dst` distinct ones.
        `has_lanes`: the content of the sources was kept when they were written.
        """
        moves = (src != dst) | (source is not stage)
        src, dst = src[moves], dst[moves]
        if not len(dst):
            return []
        origin, pool, device = source.pool, stage.pool, stage.pool.records.device
        from_rows, to_rows = torch.from_numpy(src).to(device), torch.from_numpy(dst).to(device)
        waits = has_lanes and source is stage and stage.move(src.tolist(), dst.tolist())
        if has_lanes and not waits:
            source.fingerprint()
        found, expected = origin.records.index_select(0, from_rows), origin.expected.index_select(0, from_rows)
        content_a = origin.content_a.index_select(1, from_rows) if has_lanes and not waits else None
        self._mirror.write(pool.base + dst, self._moved(origin, pool, src, dst, step))
        if content_a is not None:
            stage.forget(dst.tolist())
            self._mirror.flush()
            pool.write_lanes(to_rows, content_a, expected.select(1, CONTENT_B))
        if not torch.equal(found, expected):
            self._mirror.flush()
            damage = found - expected  # a damaged source stays damaged
            pool.records.index_copy_(0, to_rows, pool.records.index_select(0, to_rows) + damage)
        return self._arrived(stage, to_rows, waits, step) if has_lanes and self._compares_content else []

    def _moved(self, origin: PoolState, pool: PoolState, src: Slots, dst: Slots, step: int) -> Words:
        """Token, position, chain and layers of the sources under the grants and owners of the destinations' pages."""
        records = self._mirror.table[origin.base + src]
        pages, grants = dst // self._state.page_size, self._ledger.generations.view(np.uint64)
        writers = records[:, REQUEST_GENERATION]
        stale = writers >> 32 != grants[src // self._state.page_size]  # a move makes nothing current
        owners = self._ledger.owners[pages]
        uids = np.where(owners >= 0, owners.view(np.uint64), writers & MASK_32)
        records[:, REQUEST_GENERATION] = two_words(uids, np.where(stale, 0, grants[pages]))
        records[:, STEP_SITE] = two_words(step, pack_site("move", 0))
        records[:, CONTENT_B] = 0
        records[:, SEAL] = pool.seal_term
        return records

    def _arrived(self, stage: Stage, slots: Tensor, waits: bool, step: int) -> list[Hit]:
        """The destination's bytes, against the values that wait for their lanes, or against the lanes."""
        pool = stage.pool
        if waits:
            held, sent = pool.rows.gather(slots), stage.values(slots.tolist())
            if torch.equal(held, sent):
                return []
            differs = (held != sent).any(2)
        else:
            differs = lane_a_of_slots(pool, slots) != pool.content_a.index_select(1, slots)
        wrong = differs.any(0).nonzero().flatten().tolist()
        return [self._hit(pool, int(slots[number]), differs[:, number], step) for number in wrong]

    def _hit(self, pool: PoolState, slot: int, differs: Tensor, step: int) -> Hit:
        position = int(self._mirror.table[pool.base + slot, TOKEN_POSITION]) >> 32
        layers = tuple(differs.nonzero().flatten().tolist())
        return Hit(
            "T1", pool, slot, position, self._ledger.owner_of(slot // self._state.page_size), ("move", 0), step, layers
        )
