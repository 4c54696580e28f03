"""MappedGroups: what an engine declares of pages that a group behind a slot map has of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcanary.errors import PlanError
from kvcanary.manager.reporting import Reporting
from kvcanary.manager.session import Session
from kvcanary.recorder.recorder import recorded
from kvcanary.scrub.poison import Poisoner
from kvcanary.transfers.imports import adopt
from kvcanary.transfers.snapshots import PageSnapshot


class MappedGroups:
    """The part of a manager that speaks of full pages, as rows name them, and where a map leads from there."""

    def __init__(self, session: Session, reporting: Reporting) -> None:
        self._session, self._reporting = session, reporting
        self._state, self._ledger, self._checks = session.state, session.ledger, session.checks
        self.recorder = session.recorder

    @recorded
    def on_map(self, group: str, pages: Sequence[int], own_pages: Sequence[int]) -> None:
        """Full pages are granted with free pages of the group, where the map leads now; before their `on_alloc`.

        An engine that declares none has what the group frees left alone, and counted as not poisoned.
        """
        violations = self._of_group(group).granted(own_pages, self._session.step, pages)
        self._session.undeclared[group] = False
        self._checks.window_eviction.enter(group, own_pages)
        self._checks.report(violations)

    @recorded
    def on_unmap(self, group: str, pages: Sequence[int], own_pages: Sequence[int]) -> None:
        """The group gives up its own pages, the full ones may stay. Told while the map still leads there.

        What is final in them is read once more, and what that finds acts at once, before their next owner writes.
        Then they are nobody's, and poisoned.
        """
        poisoner = self._of_group(group)
        self._checks.judge_pending()
        self._checks.snapshots.left.leave(group, pages)
        if fired := self._checks.reread_leaving(group, pages):
            self._reporting.act()
        poisoner.freed(own_pages, fired or self._reporting.are_damaged(pages))

    @recorded
    def on_swap_out(self, group: str, pages: Sequence[int]) -> list[PageSnapshot]:
        """Bytes that these full pages have in the group are about to be copied elsewhere: a snapshot for each page.

        The pages stay granted: `on_unmap` tells when the group gives up its own ones, and reading one is R2 then, until
        `on_map` and `on_swap_in` tell that it is back. The snapshot of a page that is written again is of no use.
        """
        self._of_group(group)
        snapshots = self._checks.pack(pages, self._session.step, group).each()
        for snapshot in snapshots:
            self.recorder.number_snapshot(snapshot)
        return snapshots

    @recorded
    def on_swap_in(self, group: str, pages: Sequence[int], snapshots: Sequence[PageSnapshot] | None) -> None:
        """Bytes of full pages that were granted all the while lie where the map leads since `on_map`.

        `snapshots`: of `on_swap_out`, one for each page: the records of then come back, and bytes that are not those of
        then are T1. None: bytes are fingerprinted as they lie.
        """
        self._of_group(group)
        if snapshots is not None:
            self._checks.snapshots.expect_own(snapshots, pages, group)
        self._checks.judge_pending()
        if snapshots is None:
            self._adopt_again(group, pages)
        else:
            self._unpack(group, snapshots, pages)

    # helpers

    def _of_group(self, name: str) -> Poisoner:
        poisoner = self._session.mapped.get(name)
        if poisoner is None:
            groups = ", ".join(sorted(self._session.mapped)) or "there is none"
            raise PlanError(f"group must be one behind a slot map, {groups}, got {name!r}: name that of its view")
        return poisoner

    @torch.inference_mode()
    def _unpack(self, group: str, snapshots: Sequence[PageSnapshot], pages: Sequence[int]) -> None:
        """Records follow bytes into pages that have kept their grants."""
        checks = self._checks
        checks.publish_pages()
        checks.violations += checks.snapshots.unpack_group(group, snapshots, pages, self._session.step)

    def _adopt_again(self, group: str, pages: Sequence[int]) -> None:
        size = self._state.page_size
        for page in pages:
            request = self._ledger.holder(page)
            if request is None:
                continue
            first = request.pages.index(page) * size
            for pool in self._state.pools_of(group):
                positions = np.arange(first, min(first + size, request.final_len(pool.pool_id)))
                adopt(
                    self._ledger, self._checks.record_store, self._state, pool, request, positions, self._session.step
                )
