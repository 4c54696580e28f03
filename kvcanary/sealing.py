"""Sealing: records go to the device when their entries are final, in one go for everything that became final."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import mul

from kvcanary.sites import pack_site
from kvcanary.state import CanaryState
from kvcanary.twin import INCOMPLETE, Twin
from kvcanary_kernels.record import MASK_32, MASK_64

MOVED = pack_site("move", 0)


class Sealer:
    """Writes records, and what the canary expects them to be."""

    def __init__(self, state: CanaryState, twin: Twin) -> None:
        self._state, self._twin = state, twin
        self.sealed = 0

    def seal(self, rows: Iterable[int]) -> None:
        """Write the records of those of these rows that are not on the device yet."""
        unsealed = self._twin.unsealed
        rows = [row for row in rows if row in unsealed]
        if not rows:
            return
        state, words = self._state, array("Q")
        for row in rows:
            del unsealed[row]
            words.extend(self._record(row))
        where, records = state.ints(rows), state.records_of(words)
        state.records.index_copy_(0, where, records)
        state.expected.index_copy_(0, where, records)
        self.sealed += len(rows)

    def seal_all(self) -> None:
        """Nothing is left unsealed: before records are judged themselves, and with content=full."""
        self.seal(list(self._twin.unsealed))

    def _record(self, row: int) -> tuple[int, ...]:
        """The eight columns of a record, unsigned; content_b follows with the fingerprint."""
        batch, entry, generation, moved = self._twin[row]
        pool = self._state.pool_of(row)
        slot, chain = row - pool.base, self._twin.chain(batch, entry)
        if generation == INCOMPLETE:
            generation = self._twin.grant(slot)
        token, position, uid = batch.tokens[entry] & MASK_32, batch.positions[entry] & MASK_32, batch.uid(entry)
        step, site = (batch.step, batch.site_word(entry)) if moved is None else (moved & MASK_32, MOVED)
        identity = (token, position, chain & MASK_32, chain >> 32, uid, generation, step, site, slot, pool.pool_id)
        seal = pool.keys.seal_start + sum(map(mul, pool.keys.seal_keys, identity)) & MASK_64
        return (
            token | position << 32,
            chain,
            uid | generation << 32,
            step | site << 32,
            0,
            batch.layers & MASK_64,
            batch.layers >> 64,
            seal,
        )
