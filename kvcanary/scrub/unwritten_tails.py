"""UnwrittenTails: what attention over whole pages sees besides what was written must be finite (U1, a clause of R9).

It masks such entries, which is to multiply them by zero, and zero times NaN is NaN: of the null page, where padding and
the ends of tables lead, and of the part of a last page that nobody has written yet. What lies there is nobody's content
and has no fingerprint, so that this is all that can be asked of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
from torch import Tensor

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.entries import Entries, named
from kvcanary.calls.forward import Ints
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.config import CanaryConfig, share_of
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.requests import Batch
from kvcanary.native.layout import ROW_END
from kvcanary.pools.slot_maps import slots_in
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.rereads import Part, Rereads
from kvcanary_kernels.content.check import mismatched_layers
from kvcanary_kernels.record.formats import formats_of

Which = Ints | slice
EVERY = slice(None)
Granted = tuple["array[int]", list[tuple[int, Ints]]]  # pages as told, and what plans call slots from one of these on
NULL_SITE, TAIL_SITE, GRANT_SITE, RELEASE_SITE = ("sweep", 3), ("sweep", 2), ("grant", 0), ("release", 0)


class UnwrittenTails:
    """Looks at null pages in turn, at what is unwritten of new pages, and at a row's end when its last page changes.

    is_on: whether anything is looked at
    has_new_pages: whether some were granted since the last re-read
    """

    def __init__(
        self,
        state: CanaryState,
        ledger: Ledger,
        record_store: RecordStore,
        config: CanaryConfig,
        coverage: Coverage,
        rereads: Rereads,
    ) -> None:
        self._state, self._ledger, self._record_store, self._coverage = state, ledger, record_store, coverage
        self._rereads = rereads
        self.is_on = config.content != "write" and "R9" not in config.disable
        self._is_full = config.content == "full"
        self._is_host = state.records.device.type == "cpu"
        self._formats = [np.array(formats_of(pool.rows), np.int64) for pool in state.pools]
        self._granted: dict[int, Granted] = {}  # by pool
        self.has_new_pages = False
        self._parts: dict[int, list[Part]] = {}  # of the check that comes next, by pool
        self._room = array("q")  # for ends of rows
        self._generations_at = ledger.generations.ctypes.data
        self.found_finite = ledger.pages.found_finite  # pages as plans call them; `found_otherwise` takes it back

    def granted(self, pools: Iterable[PoolState], pages: Sequence[int], names: Ints | None) -> None:
        """Pages of these pools have an owner from now on, and nothing else vouches for what lies there.

        What the step leaves unwritten of them is looked at when it ends.
        names: what plans call their slots, where that is not what the pools call them
        """
        if not self.is_on or not len(pages) or self._state.page_size == 1:  # no row ends within a page of one slot
            return
        self.has_new_pages = True
        for pool in pools:
            own, renamed = self._granted.setdefault(pool.pool_id, (array("q"), []))
            if names is not None:
                renamed.append((self._state.page_size * len(own), names))
            own.extend(pages)

    def reread(
        self, step: int, stride: int, batch: Batch | None, hurried: set[str]
    ) -> list[Violation | ViolationBatch]:
        """At pages that were granted in a step that ends; what is known of them at once.

        batch:   of one of one every `stride` steps, which comes now; None: none does
        hurried: requests near whose bytes something was found
        """
        granted, self._granted, self.has_new_pages = self._granted, {}, False
        for pool_id, own in granted.items():
            self._check_granted(self._state.pools[pool_id], own, step)
        if batch is not None:
            for pool in self._state.pools:
                self._check_null_slots(pool, step, stride, self._is_full or bool(hurried))
                self._check_tails(pool, batch, TAIL_SITE, step, hurried)
        return self._launch()

    def reread_all(self, request: Request, step: int) -> list[Violation | ViolationBatch]:
        """A request ends, or its row changes hands; what is known at once."""
        for pool in self._state.pools if self.is_on else ():
            self._check_tails(pool, Batch([request]), RELEASE_SITE, step, {request.request_id})
            request.forget_tail(pool.pool_id)
        return self._launch()

    def _check_granted(self, pool: PoolState, granted: Granted, step: int) -> None:
        """All slots of these pages that nobody has written yet."""
        size, (pages, renamed) = self._state.page_size, granted
        slots, grants = np.empty((2, size * len(pages)), np.int64)
        at = 0 if renamed else self._generations_at  # those of a group have other numbers than what is granted
        pool.loops.list_slots(len(pages), pages.buffer_info()[0], size, at, slots, grants)
        names = slots
        if renamed:
            names = slots.copy()
            for first, own in renamed:
                names[first : first + len(own)] = own
            grants = self._ledger.generations[names // size]
        self.found_finite(names[::size] // size, step)  # until something fires
        which = self._unwritten(pool, slots, names)
        slots, names = slots[which], names[which]
        self._check(pool, slots, partial(_of_nobody, pool, slots, names), GRANT_SITE, step, grants[which])

    def found_otherwise(self, names: Ints) -> None:
        """In pages of these slots, as plans call them, lay something else."""
        self._ledger.pages.looked_at[0, names // self._state.page_size] = 0

    def _check_null_slots(self, pool: PoolState, step: int, stride: int, whole: bool) -> None:
        """So many that all of them are read in a rotation, and no fewer than one a step; which ones, the step says.

        A GPU pays for each check, and takes several at once as often as a host comes to the last of them.
        """
        count, number = pool.view.null_slots, step // stride
        parts = 1 if whole else max(1, count // max(stride, share_of(count, stride)))
        share = -(-count // parts) if self._is_host else count  # then no other part has any
        first = number % parts * share
        slots = np.arange(first, min(first + share, count))
        self._check(pool, slots, partial(_of_nobody, pool, slots, slots), NULL_SITE, step)

    def _check_tails(self, pool: PoolState, batch: Batch, site: tuple[str, int], step: int, always: set[str]) -> None:
        """The slots behind final entries on last pages that nobody has written since those were granted.

        always: requests whose last page is asked for again, though it was looked at before
        """
        if len(self._room) < ROW_END.size * batch.loop_arguments[0]:
            self._room = array("q", bytes(8 * ROW_END.size * batch.loop_arguments[0]))
        hurried = array("q", [request.request_id in always for request in batch.requests]) if always else None
        again = self._is_full, 0 if hurried is None else hurried.buffer_info()[0]
        arguments = *batch.loop_arguments, pool.struct_at, self._generations_at, *again
        found = pool.loops.end_rows(*arguments, self._room.buffer_info()[0])
        if not found:
            return
        size, ends = self._state.page_size, self._room[: ROW_END.size * found]
        listed = np.empty((4, found * size), np.int64)
        count = pool.loops.list_ends(found, ends.buffer_info()[0], size, self._generations_at, listed)
        names, grants, positions, rows = listed[:, :count]
        slots = slots_in(pool.view, names)
        which = self._unwritten(pool, slots, names)

        def entries() -> Entries:
            ids = [batch.requests[number].request_id for number in ends[ROW_END.row :: ROW_END.size]]
            return Entries(slots, positions, rows, ids, names=named(pool, names)).at(which)

        self._check(pool, slots[which], entries, site, step, grants[which])

    def _unwritten(self, pool: PoolState, slots: Ints, names: Ints) -> Which:
        """Which of these slots no forward has written since their page was granted; a GPU leaves that to `_check`."""
        if not self._is_host:
            if pool.view.slot_map is None:
                return EVERY
            return np.flatnonzero((slots >= pool.view.null_slots) & (slots < pool.view.num_slots))
        which, ledger = np.empty(len(slots), np.int64), self._ledger
        known = ledger.page_size, ledger.generations, self._record_store.memory
        return which[: pool.loops.find_unwritten(pool.struct_at, slots, names, *known, which)]

    def _check(
        self,
        pool: PoolState,
        slots: Ints,
        entries_of: Callable[[], Entries],
        site: tuple[str, int],
        step: int,
        grants: Ints | None = None,
    ) -> None:
        """`grants`: the generation that each is in; those are asked that nobody has written in it. None: all are."""
        if not len(slots):
            return
        if self._is_host or grants is None:
            self._coverage.finite_bytes_checked += len(slots) * pool.view.slot_bytes
        if pool.host is not None and pool.loops.are_finite(pool.struct_at, slots, self._formats[pool.pool_id]):
            return
        part = slots, grants, partial(self._fired, pool, entries_of, site, step)
        self._parts.setdefault(pool.pool_id, []).append(part)

    def _fired(
        self, pool: PoolState, entries_of: Callable[[], Entries], site: tuple[str, int], step: int, mismatch: Tensor
    ) -> list[ViolationBatch]:
        """R9 where nobody has written (U1)."""
        which = np.flatnonzero(mismatch.any(1))
        layers = mismatched_layers(mismatch, pool.view.num_layers).T.numpy()
        batch = entries_of().fired("R9", pool, site, step, which, layers=layers)
        if len(batch) and site == GRANT_SITE:
            self.found_otherwise(batch.slots if batch.names is None else batch.names)
        return [replace(batch, is_unwritten=True)] if len(batch) else []

    def _launch(self) -> list[Violation | ViolationBatch]:
        """One check a pool at all that was asked for; what it has found, where that is known at once."""
        parts, self._parts = self._parts, {}
        found = (self._rereads.check_finite(self._state.pools[pool_id], own) for pool_id, own in parts.items())
        return [*chain.from_iterable(found)]


def _of_nobody(pool: PoolState, slots: Ints, names: Ints) -> Entries:
    """Slots that are of no row, as plans call them."""
    nobody = np.full(len(slots), -1)
    return Entries(slots, nobody, nobody, (), names=named(pool, names))
