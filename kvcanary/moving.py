"""Moves: records follow the bytes that an engine has moved, damage moves with them, and what arrived is read again."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class Move:
    """Entries that were moved, all [n] int64: where they lay and lie, and what plans call these slots."""

    src: Slots
    dst: Slots
    src_names: Slots
    dst_names: Slots

    def without_stays(self) -> Move:
        moves = self.src != self.dst
        return Move(self.src[moves], self.dst[moves], self.src_names[moves], self.dst_names[moves])


class Mover:
    """Applies declared moves to records and fingerprints, within a pool or from one to another."""

    def __init__(self, state: CanaryState, mirror: Mirror, ledger: Ledger, compares_content: bool) -> None:
        self._state, self._mirror, self._ledger = state, mirror, ledger
        self._compares_content = compares_content

    def apply(self, source: Stage, stage: Stage, move: Move, step: int, has_lanes: bool) -> list[Hit]:
        """T1 where bytes that arrived are not those that were written at the source.

        Every source was read before any destination was written; destinations are distinct.
        `has_lanes`: the content of the sources was kept when they were written.
        """
        move = move.without_stays() if source is stage else move
        src, dst = move.src, move.dst
        if not len(dst):
            return []
        origin, pool, device = source.pool, stage.pool, stage.pool.records.device
        from_rows, to_rows = torch.from_numpy(src).to(device), torch.from_numpy(dst).to(device)
        waits = has_lanes and source is stage and stage.move(src.tolist(), dst.tolist())
        if has_lanes and not waits:
            source.fingerprint()
        found, expected = origin.records.index_select(0, from_rows), origin.expected.index_select(0, from_rows)
        content_a = origin.content_a.index_select(1, from_rows) if has_lanes and not waits else None
        self._mirror.write(pool.base + dst, self._moved(origin, pool, move, step))
        if content_a is not None:
            stage.forget(dst.tolist())
            self._mirror.flush()
            pool.write_lanes(to_rows, content_a, expected.select(1, CONTENT_B))
        if not torch.equal(found, expected):
            self._mirror.flush()
            damage = found - expected  # a damaged source stays damaged
            pool.records.index_copy_(0, to_rows, pool.records.index_select(0, to_rows) + damage)
        compares = has_lanes and self._compares_content
        return self._arrived(stage, to_rows, move.dst_names, waits, step) if compares else []

    def _moved(self, origin: PoolState, pool: PoolState, move: Move, step: int) -> Words:
        """Token, position, chain and layers of the sources under the grants and owners of the destinations' pages."""
        records = self._mirror.table[origin.base + move.src]
        pages, grants = move.dst_names // self._state.page_size, self._ledger.generations.view(np.uint64)
        writers = records[:, REQUEST_GENERATION]
        stale = writers >> 32 != grants[move.src_names // self._state.page_size]  # a move makes nothing current
        owners = self._ledger.owners[pages]
        uids = np.where(owners >= 0, owners.view(np.uint64), writers & MASK_32)
        records[:, REQUEST_GENERATION] = two_words(uids, np.where(stale, 0, grants[pages]))
        records[:, STEP_SITE] = two_words(step, pack_site("move", 0))
        records[:, CONTENT_B] = 0
        records[:, SEAL] = pool.seal_term
        return records

    def _arrived(self, stage: Stage, slots: Tensor, names: Slots, waits: bool, step: int) -> list[Hit]:
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
        return [self._hit(pool, int(slots[n]), int(names[n]), differs[:, n], step) for n in wrong]

    def _hit(self, pool: PoolState, slot: int, name: int, differs: Tensor, step: int) -> Hit:
        position = int(self._mirror.table[pool.base + slot, TOKEN_POSITION]) >> 32
        layers = tuple(differs.nonzero().flatten().tolist())
        owner = self._ledger.owner_of(name // self._state.page_size)
        named = None if pool.view.slot_map is None else name
        return Hit("T1", pool, slot, position, owner, ("move", 0), step, layers, named=named)
