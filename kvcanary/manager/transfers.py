"""Transfers: what an engine declares of bytes that come from elsewhere, leave, or are moved within its pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.forward import on_host
from kvcanary.errors import PlanError
from kvcanary.manager.rules import Rewritten
from kvcanary.manager.session import Session
from kvcanary.pools.slot_maps import slots_in
from kvcanary.recorder.recorder import recorded
from kvcanary.records.record_store import Move
from kvcanary.records.state import PoolState
from kvcanary.transfers.imports import adopt
from kvcanary.transfers.snapshots import PageSnapshot


class Transfers:
    """The part of a manager that speaks of bytes which no forward has written where they lie."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state, self._ledger, self._checks = session.state, session.ledger, session.checks
        self.recorder = session.recorder

    @recorded
    def on_load_begin(self, request_id: str, pages: Sequence[int]) -> None:
        """Bytes are on their way into these pages of the row; reading one of them is R12 until `on_load_end`."""
        self._checks.judge_pending()
        self._ledger.load_begin(request_id, pages, self._session.step)

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
        were damaged on their way, and the certificate counts them.
        """
        if snapshot is not None:
            self._checks.snapshots.expect_own([snapshot], pages)
        self._checks.judge_pending()
        self._ledger.load_end(request_id, pages, self._session.step)
        if snapshot is None:
            self._adopt(request_id, pages, length)
        else:
            self._unpack("load", snapshot, request_id, pages, length)

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
        self._checks.snapshots.expect_own([snapshot], pages)
        self._checks.judge_pending()
        self._ledger.restore(request_id, pages, self._session.step)
        self._unpack("restore", snapshot, request_id, pages, length)

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

    # helpers

    @torch.inference_mode()
    def _unpack(self, how: str, snapshot: PageSnapshot, request_id: str, pages: Sequence[int], length: int) -> None:
        """Bytes are back, and their records follow; nothing waits to be judged. `how`: what brought them."""
        checks, request, step = self._checks, self._ledger.request(request_id), self._session.step
        checks.publish_pages()
        checks.violations += checks.snapshots.unpack(how, snapshot, request, pages, length, step)

    def _adopt(self, request_id: str, pages: Sequence[int], length: int) -> None:
        request = self._ledger.request(request_id)
        size = self._state.page_size
        places = sorted(request.pages.index(page) for page in pages)
        positions = np.array([p for place in places for p in range(place * size, (place + 1) * size) if p < length])
        self._session.coverage.skip("entries that were loaded without a seal", len(positions))
        for pool in self._state.pools:
            adopt(self._ledger, self._checks.record_store, self._state, pool, request, positions, self._session.step)
            request.row_lens[pool.pool_id] = max(request.row_lens[pool.pool_id], length)


def _expect_equal_rows(source: PoolState, target: PoolState) -> None:
    """Fingerprints name content wherever it lies, but only among pools whose rows have the same shape."""
    shapes = [(pool.view.num_layers, pool.rows.words_per_row) for pool in (source, target)]
    if shapes[0] != shapes[1]:
        raise PlanError(
            f"a move must be between pools of equal rows: {source.name!r} has {shapes[0][0]} layers of {shapes[0][1]} "
            f"words, {target.name!r} {shapes[1][0]} of {shapes[1][1]}"
        )
