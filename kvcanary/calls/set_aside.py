"""What was set aside: requests and pages of which the canary does not know enough any more to judge them (L1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch

REQUESTS, PAGES = "requests set aside after L1", "pages set aside after L1"
CHECKS, EVENTS = "checks that fired on what was set aside", "contradictions of what was set aside"


class Excluded:
    """A request is set aside until it is admitted anew, a page until it is granted anew; false while nothing is.

    forwards: pools and sites of captured forwards that were launched otherwise than they were built; their H1 follows
    """

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self.requests: set[str] = set()
        self.pages: set[int] = set()
        self.forwards: set[tuple[str, tuple[str, int]]] = set()

    def __bool__(self) -> bool:
        return bool(self.requests or self.pages)

    def add(self, requests: Iterable[str], pages: Iterable[int]) -> None:
        """They are judged no more."""
        names, numbers = {*requests} - self.requests, {*pages} - self.pages
        self.requests |= names
        self.pages |= numbers
        self._coverage.skip(REQUESTS, len(names))
        self._coverage.skip(PAGES, len(numbers))

    def is_known(self, requests: Iterable[str], pages: Iterable[int]) -> bool:
        """Whether one of these was set aside before: what contradicts now follows from that, and is counted alone."""
        if self.requests.isdisjoint(requests) and self.pages.isdisjoint(pages):
            return False
        self._coverage.skip(EVENTS, 1)
        return True

    def granted(self, request_ids: Iterable[str], pages: Iterable[Iterable[int]]) -> None:
        """Pages have a new life; those of a request that is set aside are as little known as it is."""
        for name, own in zip(request_ids, pages, strict=True):
            if name in self.requests:
                self.add((), own)
            else:
                self.pages.difference_update(own)

    def forget(self, request_id: str) -> None:
        """The request has ended, or begins."""
        self.requests.discard(request_id)

    def judged(self, violation: Violation | ViolationBatch) -> Violation | ViolationBatch | None:
        """What is left of a violation, None where nothing is; the rest is counted."""
        if not self or violation.code in ("L1", "X1", "X2"):
            return violation
        return self._rows(violation) if isinstance(violation, ViolationBatch) else self._violation(violation)

    def _violation(self, violation: Violation) -> Violation | None:
        names = [name for name in (violation.request_id, *violation.others) if name is not None]
        left = [name for name in names if name not in self.requests]
        on_page = violation.slot >= 0 and violation.state is None and violation.page in self.pages
        is_launched_otherwise = violation.code == "H1" and (violation.pool.name, violation.site) in self.forwards
        if is_launched_otherwise or on_page or (names and not left):
            self._coverage.skip(CHECKS, 1)
            return None
        return violation if left == names else replace(violation, request_id=left[0], others=tuple(left[1:]))

    def _rows(self, batch: ViolationBatch) -> ViolationBatch | None:
        is_excluded = np.array([*(name in self.requests for name in batch.request_ids), False])  # the last: nobody's
        slots = batch.slots if batch.names is None else batch.names
        on_page = np.isin(slots // batch.pool.view.page_size, np.array(sorted(self.pages), np.int64)) & (slots >= 0)
        left = np.flatnonzero(~(is_excluded[batch.rows] | on_page))
        self._coverage.skip(CHECKS, len(batch) - len(left))
        return batch.at(left) if len(left) else None
