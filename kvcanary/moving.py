"""Moves: records follow the bytes that an engine has moved, and damage moves with them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.fingerprints import Fingerprints
from kvcanary.sites import pack_site
from kvcanary.state import CanaryState, PoolState
from kvcanary.twin import Twin
from kvcanary_kernels import record
from kvcanary_kernels.record import MASK_32, MASK_64, SEAL_KEYS, SEAL_SLOT_KEY

GENERATION_WORD, STEP_WORD, SITE_WORD = 5, 6, 7  # of the identity
SLOT_KEY = SEAL_SLOT_KEY - SEAL_KEYS


@dataclass(slots=True, eq=False)
class Move:
    """A declared move; every source was read before any destination was written."""

    pool: PoolState
    src: list[int]
    dst: list[int]
    step: int


class Mover:
    """Applies moves to records, fingerprints and twin, several at once where they do not touch each other."""

    def __init__(self, state: CanaryState, twin: Twin, fingerprints: Fingerprints, grants: Sequence[int]) -> None:
        self._state, self._twin, self._fingerprints, self._grants = state, twin, fingerprints, grants

    def apply(self, moves: Sequence[Move]) -> None:
        for pool in self._state.pools:
            for group in _independent([move for move in moves if move.pool is pool]):
                pairs = [pair for move in group for pair in zip(move.src, move.dst, strict=True)]
                pairs = [(source, slot) for source, slot in pairs if source != slot]
                if pairs:
                    self._apply(pool, [source for source, _ in pairs], [slot for _, slot in pairs], group[0].step)

    def _apply(self, pool: PoolState, from_slots: list[int], to_slots: list[int], step: int) -> None:
        state, size = self._state, self._state.page_size
        if self._fingerprints.waits_for(pool, from_slots):
            self._fingerprints.write()
        grants = [self._grants[slot // size] for slot in to_slots]
        src, dst = state.ints(from_slots), state.ints(to_slots)
        was, expected = pool.records.index_select(0, src), pool.expected.index_select(0, src)
        moved = self._resealed(pool, expected.tolist(), from_slots, to_slots, grants, step)
        pool.expected.index_copy_(0, dst, moved)
        if not torch.equal(was, expected):
            moved = moved + (was - expected)  # a damaged source stays damaged
        pool.records.index_copy_(0, dst, moved)
        pool.content_a.index_copy_(1, dst, pool.content_a.index_select(1, src))
        self._twin.move([pool.base + slot for slot in from_slots], [pool.base + slot for slot in to_slots], grants)
        self._fingerprints.move(pool, from_slots, to_slots)

    def _resealed(
        self,
        pool: PoolState,
        rows: Sequence[list[int]],
        from_slots: Sequence[int],
        to_slots: Sequence[int],
        grants: Sequence[int],
        step: int,
    ) -> Tensor:
        """[n, 8]: the records with the destination's generation, the moving step and site; seals by difference."""
        keys, site = pool.keys.seal_keys, pack_site("move", 0)
        words = array("Q")
        for row, source, slot, generation in zip(rows, from_slots, to_slots, grants, strict=True):
            owner, written = row[record.REQUEST_GENERATION] & MASK_64, row[record.STEP_SITE] & MASK_64
            seal = row[record.SEAL] + keys[SLOT_KEY] * (slot - source)
            seal += keys[GENERATION_WORD] * (generation - (owner >> 32))
            seal += keys[STEP_WORD] * ((step & MASK_32) - (written & MASK_32))
            seal += keys[SITE_WORD] * (site - (written >> 32))
            row[record.REQUEST_GENERATION] = owner & MASK_32 | generation << 32
            row[record.STEP_SITE] = step & MASK_32 | site << 32
            row[record.SEAL] = seal
            words.extend([word & MASK_64 for word in row])
        return self._state.columns(words, record.COLUMNS)


def _independent(moves: Sequence[Move]) -> list[list[Move]]:
    """Runs of moves of one step in which no move reads or writes what an earlier one has written."""
    groups: list[list[Move]] = []
    written: set[int] = set()
    for move in moves:
        touched = not written.isdisjoint(move.src) or not written.isdisjoint(move.dst)
        if not groups or touched or groups[-1][0].step != move.step:
            groups.append([])
            written.clear()
        groups[-1].append(move)
        written.update(move.dst)
    return groups
