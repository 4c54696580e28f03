"""Sealing: a record for everything that the pending forwards have written, each chained to what it continues."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcanary.calls.entries import Entries, fired_writes, named
from kvcanary.calls.forward import Forward, Ints
from kvcanary.calls.violation import NO_BRANCH
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.ledger.ledger import Ledger
from kvcanary.native.layout import ASTRAY, MISPLACED, NULL_WRITTEN, PAGE_FRESH
from kvcanary.records.record_store import RecordStore, Words
from kvcanary.records.state import stored_columns
from kvcanary_kernels.record.layout import CHAIN


class Sealer:
    """Seals all entries of a step, forward by forward, in one compiled loop each."""

    def __init__(self, record_store: RecordStore, ledger: Ledger) -> None:
        self._record_store, self._ledger = record_store, ledger

    def seal(self, forwards: Sequence[Forward]) -> list[ViolationBatch]:
        """Seal all entries in the order of their run; W5 where a position does not follow the parent's, R5 where a row
        does not read what its lineage goes on from.
        """
        return self.sealed(forwards, [self._seal(forward) for forward in forwards])

    def _seal(self, forward: Forward) -> int:
        """A record for all that a forward has written; what `loops.seal_plan` gives."""
        pool, pages, ids = forward.pool, self._ledger.pages, forward.host_ids
        seen: int = pool.loops.seal_plan(
            forward.head,
            forward.slot_names,
            ids.numpy(),
            self._roots(forward).view(np.int64),
            pages.generations,
            pages.states,
            *(pool.all_layers if forward.stored == pool.full_layers else stored_columns(forward.stored)),
            *self._record_store.native_memory,
        )
        self._record_store.sealed(pool, forward.planned.slots, seen)
        return seen

    def sealed(self, forwards: Sequence[Forward], seen: Sequence[int]) -> list[ViolationBatch]:
        """What follows from what a loop has seen while it sealed each of these forwards (native/layout.py)."""
        violations, record_store = [], self._record_store
        for forward, found in zip(forwards, seen, strict=True):
            pool, slots = forward.pool, forward.planned.slots
            if found & PAGE_FRESH:
                self._ledger.pages.wrote(forward.slot_names, self._ledger.page_size)
            if found & NULL_WRITTEN:  # these have no records: their chains were for what follows in the same step
                record_store.table[slots[slots < pool.view.null_slots] + pool.base, CHAIN] = 0
            if found & MISPLACED:
                violations.append(_misplaced(forward))
            if found & ASTRAY:
                violations += judge_lineage(forward, record_store.memory[pool.base :])
        return violations

    def _roots(self, forward: Forward) -> Words:
        """[rows] chain that a row continues where it reads nothing before its own entries.

        Of a window that shows nothing there, that is the chain of what the host knows.
        """
        pool_id = forward.pool.pool_id
        roots = np.array([request.root(pool_id) for request in forward.requests], np.uint64).repeat(forward.width)
        if forward.has_starts:
            for row, (own, bound, start) in enumerate(zip(forward.owns, forward.bounds, forward.starts, strict=False)):
                if own == bound and start:
                    roots[row] = self._ledger.truth(forward.request_of(row), pool_id, forward.begins[row]) or 0
        return roots


def _misplaced(forward: Forward) -> ViolationBatch:
    """W5 for every entry whose position is not its parent's plus one."""
    positions, per_row = forward.planned.positions, np.array(forward.written, np.int64)
    wanted = np.repeat(np.array(forward.begins, np.int64), per_row)
    if forward.parents is None:
        wanted += np.arange(len(wanted)) - np.repeat(per_row.cumsum() - per_row, per_row)
    else:
        parents: Ints = np.array(forward.parents, np.int64)
        wanted = np.where(parents < 0, wanted, positions[parents] + 1)
    which = np.flatnonzero(positions != wanted)
    return fired_writes("W5", forward, which, parent_positions=wanted - 1)


def judge_lineage(forward: Forward, records: Ints) -> list[ViolationBatch]:
    """R5 where a row reads, in front of its own entry, another one than its lineage goes on from.

    records: [slots, 8] as the canary has written them. Chain values are compared and not slots: copies keep them.
    """
    if forward.lineage is None or forward.chains_before is None:
        return []
    forward.read_rows()
    places, width, pool = np.array(forward.owns) - 1, forward.width, forward.pool
    rows, branches, before = np.arange(len(places)), forward.lineage, forward.chains_before.reshape(-1, width)
    slots, names = forward.ids[places], forward.names[places]
    read = records[slots, CHAIN]
    parents = np.where((branches >= 0) & (branches < width), branches, NO_BRANCH)
    wanted = np.where(parents == NO_BRANCH, 0, before[rows // width, parents])
    is_same = before[rows // width] == read[:, None]
    found = np.where(is_same.any(1), is_same.argmax(1), NO_BRANCH)
    astray = (read != wanted) & (slots >= pool.view.null_slots) & (places >= forward.bounds[:-1])
    entries = Entries(slots, np.array(forward.begins) - 1, rows // width, forward.request_ids, names=named(pool, names))
    lineages = np.stack((rows % width, branches, found), 1)
    return [entries.fired("R5", pool, forward.site, forward.step, np.flatnonzero(astray), lineages=lineages)]
