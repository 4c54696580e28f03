"""Transfers: what an engine declares of bytes that come from elsewhere, leave, or are moved within its pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.forward import on_host
from kvcanary.errors import ContradictionError, ForeignSnapshotError, PlanError
from kvcanary.ledger.requests import Judged
from kvcanary.manager.rules import Rewritten
from kvcanary.manager.session import Session
from kvcanary.pools.attachment import Attachment
from kvcanary.pools.memory import Released, rebind
from kvcanary.pools.slot_maps import slots_in
from kvcanary.pools.views import PoolView
from kvcanary.recorder.recorder import recorded
from kvcanary.records.record_store import Move
from kvcanary.records.state import PoolState
from kvcanary.transfers.imports import adopt, did_not_arrive, forget_bytes, take_as_it_lies
from kvcanary.transfers.snapshots import PageSnapshot


class Transfers:
    """The part of a manager that speaks of bytes which no forward has written where they lie."""

    def __init__(self, session: Session, attachment: Attachment) -> None:
        self._session, self._attachment = session, attachment
        self._released: dict[str, Released] = {}
        self._state, self._ledger, self._checks = session.state, session.ledger, session.checks
        self.recorder = session.recorder

    @recorded
    def on_load_begin(self, request_id: str, pages: Sequence[int]) -> None:
        """Bytes are on their way into these pages of the row; reading one of them is R12 until `on_load_end`."""
        self._checks.judge_pending()
        self._ledger.load_begin(request_id, pages, self._session.step)

    def prepare_load(self, request_id: str, pages: Sequence[int], length: int, snapshot: PageSnapshot) -> None:
        """These arguments of an `on_load_end` to come, told while the bytes travel: all but the comparison is done.

        It changes nothing, and need not be called; what is wrong with them `on_load_end` says.
        """
        request = self._ledger.requests.get(request_id)
        if request is None or not set(pages).issubset(request.pages):
            return
        with suppress(ContradictionError, ForeignSnapshotError), torch.inference_mode():
            self._checks.snapshots.prepare(snapshot, request, pages, length, self._began(pages))

    @recorded
    def on_offload(self, pages: Sequence[int]) -> PageSnapshot:
        """Bytes of these pages are about to be copied elsewhere; give the snapshot to the `on_load_end` of the way
        back.

        The pages stay what they are: free or evict them, when the copy is done, as any others.
        """
        snapshot = self._checks.pack(pages, self._session.step)
        self.recorder.number_snapshot(snapshot)
        return snapshot

    @recorded
    def on_load_end(
        self, request_id: str, pages: Sequence[int], length: int, snapshot: PageSnapshot | None = None
    ) -> None:
        """They have arrived: positions below `length` hold the request's own tokens.

        `snapshot`: of `on_offload`, of as many pages in the same order: the records of then come back, and bytes that
        are not those of then are T1. Without it bytes are fingerprinted as they lie: nothing can tell whether they
        were damaged on their way, and the certificate counts them. Only what did not arrive where other
        things did, such as scales, or V of a layer, is T1 then too.
        """
        if snapshot is not None:
            self._unpack("load", self._ledger.load_end, snapshot, request_id, pages, length)
            return
        self._checks.judge_pending()
        self._ledger.load_end(request_id, pages, self._session.step)
        self._adopt(request_id, pages, length)

    @recorded
    def on_load_fail(self, request_id: str, pages: Sequence[int]) -> None:
        """They did not arrive: these pages must be written, loaded again or freed before anybody reads them."""
        self._checks.judge_pending()
        self._ledger.load_fail(request_id, pages, self._session.step)

    @recorded
    def on_restore(self, request_id: str, pages: Sequence[int], length: int, snapshot: PageSnapshot) -> None:
        """Bytes that were put away lie in these pages of the row, granted and not yet written: their records follow.

        As `on_load_begin` and `on_load_end` with a snapshot, where nothing can read the pages in between.
        """
        self._unpack("restore", self._ledger.restore, snapshot, request_id, pages, length)

    @recorded
    def before_move(self) -> None:
        """Bytes that a forward of this step wrote are about to move: what is pending is judged where they lie now."""
        self._session.expect_closed("before_move()")
        self._checks.judge_pending()

    @recorded
    def on_move(self, pool: str, src: Tensor, dst: Tensor, to: str | None = None, guesses: bool = False) -> None:
        """Bytes were moved, every source read before any destination was written: the records follow.

        `to`: another pool of equal rows, where `dst` are slots of it. What arrived is read again at once (T1). Under
        content=full what pending forwards have read in `dst` is lost, where nobody called `before_move`.
        `guesses`: entries of draft forwards, which lengthen no row; their bytes are read under content "full" alone.
        """
        session, checks = self._session, self._checks
        session.expect_closed("on_move()")
        source, target = session.pool(pool), session.pool(pool if to is None else to)
        if source is not target:
            _expect_equal_rows(source, target)
        left, came = (np.ascontiguousarray(on_host(slots)) for slots in (src, dst))
        move = Move(slots_in(source.view, left), slots_in(target.view, came), left, came)
        if checks.waits:
            move = move.of_entries(source, target)  # what a slot map sends nowhere has no records
        checks.judge_pending(Rewritten(target, move.dst))
        has_fingerprints = not guesses or session.config.content == "full"
        checks.violations += checks.mover.apply(source, target, move, session.step, has_fingerprints, not guesses)

    def on_cleared(self, pools: Sequence[str] = ()) -> None:
        """The bytes of these pools (none named: of all) are about to go, between two steps: sleep, or a resize.

        Requests, pages and a prefix cache stay as they are told; who reads an entry that was written before is R12,
        *the bytes are gone*. The canary lets go of the tensors, and reads nothing there, until `on_reallocated`: a
        forward in between is a HookOrderError.
        """
        names = tuple(pools) or tuple(pool.name for pool in self._state.pools)
        chosen = [self._session.pool(name) for name in names]
        self._session.expect_closed("on_cleared()")
        self._checks.judge_pending()
        self.forget_bytes_of(names)
        for pool in chosen:
            if not pool.is_gone:
                self._released[pool.name], pool.is_gone = Released(pool.view), True
        self._attachment.claim([pool.view for pool in self._state.pools])

    def on_reallocated(self, views: Sequence[PoolView] = (), keeps_bytes: bool = False) -> None:
        """Pools have memory again, or other memory than before, and nothing of what was written.

        views: of the pools that lie elsewhere now, named and laid out as before; a pool that was cleared and of which
               the engine has kept the very tensors needs none
        keeps_bytes: the engine has copied all of them, as where it moves a pool: they are what was written, and checked
        PlanError for another layout or size: detach() and attach a new canary then.
        """
        self._session.expect_closed("on_reallocated()")
        given = {view.name: view for view in views}
        chosen = [self._session.pool(name) for name in given] + [
            pool for pool in self._state.pools if pool.is_gone and pool.name not in given
        ]
        for pool in chosen:
            rebind(pool.view, given.get(pool.name) or self._released[pool.name].again(pool.view))
            pool.is_gone = False
        self._attachment.claim([pool.view for pool in self._state.pools])
        self._checks.judge_pending()
        if not keeps_bytes:
            self.forget_bytes_of([pool.name for pool in chosen if self._released.pop(pool.name, None) is None])
            for pool in chosen:
                take_as_it_lies(self._state, pool)

    # helpers

    def forget_bytes_of(self, names: Sequence[str]) -> None:
        """What `on_cleared` says of records; a replay has no bytes to lose."""
        if not names:
            return
        self.recorder.note("on_cleared", tuple(names))
        for name in names:
            forget_bytes(self._session.pool(name), self._checks.record_store, self._session.step)
        for poisoner in self._session.poisoners:
            poisoner.forget()
        for request in self._ledger.requests.values():
            request.judged = [Judged()] * len(request.judged)

    @torch.inference_mode()
    def _unpack(
        self,
        how: str,
        note: Callable[[str, Sequence[int], int], None],
        snapshot: PageSnapshot,
        request_id: str,
        pages: Sequence[int],
        length: int,
    ) -> None:
        """Bytes are back, and their records follow. `how`: what brought them, of which `note` tells the ledger."""
        checks, snapshots, step = self._checks, self._checks.snapshots, self._session.step
        incoming = snapshots.take_prepared(snapshot, self._ledger.requests.get(request_id), pages, length)
        if incoming is None:
            snapshots.expect_own([snapshot], pages)
            began = self._began(pages)
        checks.judge_pending()
        note(request_id, pages, step)
        request = self._ledger.request(request_id)
        if incoming is None:
            incoming = snapshots.bring(snapshot, request, pages, length, began)
        checks.violations += snapshots.unpack(how, snapshot, request, pages, length, step, incoming)

    def _began(self, pages: Sequence[int]) -> int:
        """The step of their `on_load_begin`; this one where there was none."""
        began = self._ledger.load_began(pages[0]) if pages else None
        return self._session.step if began is None else began

    def _adopt(self, request_id: str, pages: Sequence[int], length: int) -> None:
        request = self._ledger.request(request_id)
        size, step = self._state.page_size, self._session.step
        places = sorted(request.pages.index(page) for page in pages)
        positions = np.array([p for place in places for p in range(place * size, (place + 1) * size) if p < length])
        self._session.coverage.skip("entries that were loaded without a seal", len(positions))
        starts = {request.pages[place]: place * size for place in places if place * size < length}
        for pool in self._state.pools:
            adopt(self._ledger, self._checks.record_store, self._state, pool, request, positions, step)
            if self._session.config.content != "write":
                self._checks.violations += did_not_arrive(pool, starts, size, request_id, step)
            request.row_lens[pool.pool_id] = max(request.row_lens[pool.pool_id], length)


def _expect_equal_rows(source: PoolState, target: PoolState) -> None:
    """Fingerprints name content wherever it lies, but only among pools whose rows have the same shape."""
    shapes = [(pool.view.num_layers, pool.rows.words_per_row) for pool in (source, target)]
    if shapes[0] != shapes[1]:
        raise PlanError(
            f"a move must be between pools of equal rows: {source.name!r} has {shapes[0][0]} layers of {shapes[0][1]} "
            f"words, {target.name!r} {shapes[1][0]} of {shapes[1][1]}"
        )
