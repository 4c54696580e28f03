"""Moves: records follow the bytes that an engine has moved, damage moves with them, and what arrived is read again."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.calls.forward import Ints
from kvcanary.calls.violation import Violation
from kvcanary.errors import ContradictionError
from kvcanary.ledger.ledger import Ledger
from kvcanary.records.fingerprints import fingerprints_of_slots, slots_are_right
from kvcanary.records.record_store import NOT_ALL, Move, RecordStore
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.record.layout import CONTENT_B, TOKEN_POSITION


class Mover:
    """Applies declared moves to records and fingerprints, within a pool or from one to another."""

    def __init__(
        self,
        state: CanaryState,
        record_store: RecordStore,
        ledger: Ledger,
        compares_content: bool,
        reports_sources: bool = True,
    ) -> None:
        """`reports_sources`: damage that was there before the move is R9, and not T1 as it arrives."""
        self._state, self._record_store, self._ledger = state, record_store, ledger
        self.compares_content, self._reports_sources = compares_content, reports_sources

    def apply(
        self, origin: PoolState, pool: PoolState, move: Move, step: int, has_fingerprints: bool, lengthens: bool
    ) -> list[Violation]:
        """T1 where bytes that arrived are not those that were written at the source; R9 where they lay there so.

        What nobody has written at the source, such as the end of a last page, arrives as never written, whatever lies
        there. Every source was read before any destination was written; destinations are distinct.
        has_fingerprints: the content of the sources was kept when they were written
        lengthens: rows at whose end entries have arrived are written so far
        ContradictionError for slots that the pools do not have: nothing is written then.
        """
        furthest, has_blanks = NOT_ALL, False
        if pool.host is not None:
            furthest, has_blanks = self._follow(origin, pool, move, step, has_fingerprints)
        if furthest == NOT_ALL:
            move = move.of_entries(origin, pool)
        if not len(move.dst):
            return []
        moved = move
        if furthest == NOT_ALL:
            moved = move.at(move.src != move.dst) if origin is pool else move
            if len(moved.dst):
                has_blanks = self._carry(origin, pool, moved, step, has_fingerprints)
        if has_blanks:
            move, moved = (own.at(self._are_written(pool, own)) for own in (move, moved))
        if lengthens and (furthest == NOT_ALL or not self._ledger.rows.reach(pool.pool_id, furthest)):
            positions = self._record_store.table[pool.base + move.dst, TOKEN_POSITION] >> 32
            self._ledger.rows.note_moved(pool.pool_id, move.dst_names, positions.view(np.int64))
        return self._arrived(pool, moved.dst, moved.dst_names, step, (origin, moved)) if has_fingerprints else []

    def arrived(self, pool: PoolState, destination: Ints, step: int) -> list[Violation]:
        """T1 for slots into which a captured step has moved entries, records and all; -1: nothing moved."""
        slots = destination[destination >= 0]
        return self._arrived(pool, slots, slots, step)

    def _are_written(self, pool: PoolState, move: Move) -> NDArray[np.bool_]:
        grants = self._ledger.generations[move.dst_names // self._state.page_size]
        return self._record_store.are_of(pool.base + move.dst, grants)

    def _follow(
        self, origin: PoolState, pool: PoolState, move: Move, step: int, has_fingerprints: bool
    ) -> tuple[int, bool]:
        return self._record_store.move(
            origin, pool, move, step, has_fingerprints, self._ledger.generations, self._ledger.owners
        )

    def _carry(self, origin: PoolState, pool: PoolState, move: Move, step: int, has_fingerprints: bool) -> bool:
        """Entries that move, none of them of a null slot; whether nobody has written some of them."""
        on_device = pool.host is None
        with torch.inference_mode():
            if on_device:
                device = pool.records.device
                from_rows, to_rows = torch.from_numpy(move.src).to(device), torch.from_numpy(move.dst).to(device)
                found, expected = origin.records.index_select(0, from_rows), origin.expected.index_select(0, from_rows)
                content_a = origin.content_a.index_select(1, from_rows)
            furthest, has_blanks = self._follow(origin, pool, move, step, has_fingerprints)
            if furthest == NOT_ALL:
                raise ContradictionError(
                    f"a move must name slots of {origin.name!r} and {pool.name!r}, of {origin.view.num_slots} and "
                    f"{pool.view.num_slots} slots, got {move.src.max()} and {move.dst.max()} at most"
                )
            if on_device:
                self._record_store.flush()
                if has_fingerprints:
                    kept = torch.from_numpy(self._are_written(pool, move)).to(device)
                    fingerprints = content_a[:, kept], expected.select(1, CONTENT_B)[kept]
                    pool.write_fingerprints(to_rows[kept], *fingerprints)
                damage = found - expected  # a damaged source stays damaged
                pool.records.index_copy_(0, to_rows, pool.records.index_select(0, to_rows) + damage)
        return has_blanks

    def _arrived(
        self, pool: PoolState, places: Ints, names: Ints, step: int, sent: tuple[PoolState, Move] | None = None
    ) -> list[Violation]:
        """The destination's bytes, against the fingerprints of what was written at the source.

        sent: whence they came, where the host knows: a source that differs as they do was damaged before it was moved.
        """
        if not self.compares_content or not len(places):
            return []
        if pool.host is not None and pool.loops.match_slots(pool.struct_at, places, False):
            return []
        slots = torch.from_numpy(places).to(pool.records.device)
        if pool.host is None and slots_are_right(pool, slots):
            return []
        differs = _differing(pool, slots)
        wrong = differs.any(0).nonzero().flatten().tolist()
        violations = [self._violation("T1", pool, int(slots[n]), int(names[n]), differs[:, n], step) for n in wrong]
        if sent is None or not wrong or not self._reports_sources:
            return violations
        origin, move = sent
        sources = torch.from_numpy(move.src[wrong]).to(slots.device)
        was_so = (_differing(origin, sources) == differs[:, wrong]).all(0).cpu().numpy()
        if origin is pool:
            was_so &= ~np.isin(move.src[wrong], move.dst)  # something else lies there now
        for number in was_so.nonzero()[0].tolist():
            n = wrong[number]
            violations[number] = self._violation(
                "R9", origin, int(move.src[n]), int(move.src_names[n]), differs[:, n], step
            )
        return violations

    def _violation(self, code: str, pool: PoolState, slot: int, name: int, differs: Tensor, step: int) -> Violation:
        position = int(self._record_store.table[pool.base + slot, TOKEN_POSITION]) >> 32
        layers = tuple(differs.nonzero().flatten().tolist())
        owner = self._ledger.owner_of(name // self._state.page_size)
        named = None if pool.view.slot_map is None else name
        return Violation(code, pool, slot, position, owner, ("move", 0), step, layers, named=named)


def _differing(pool: PoolState, slots: Tensor) -> Tensor:
    """[num_layers, n] bool: layers of these slots in which bytes are not those that were written."""
    differs: Tensor = fingerprints_of_slots(pool, slots)[0] != pool.content_a.index_select(1, slots)
    return differs
