"""Accounting: where all pages are, and whether rows, references and a prefix cache agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcanary.errors import PageReferenceError
from kvcanary.ledger.ledger import Ledger
from kvcanary.ledger.requests import NO_PAGE
from kvcanary_kernels.record.layout import FREE, QUARANTINED, SHARED


@dataclass(frozen=True)
class Accounting:
    """Pages by what they are; null pages are not counted. free + quarantined + owned + shared == total.

    owned: private pages of a request, counted by owner
    shared, free, quarantined: counted by state
    """

    free: int
    quarantined: int
    owned: int
    shared: int
    total: int


def account(ledger: Ledger) -> Accounting:
    """Count all pages; linear in the size of the pool."""
    states, owners = (array[ledger.null_pages :] for array in (ledger.states, ledger.owners))
    free, quarantined, shared = (int((states == state).sum()) for state in (FREE, QUARANTINED, SHARED))
    return Accounting(free, quarantined, int((owners >= 0).sum()), shared, len(states))


def audit(ledger: Ledger, cached: Sequence[int] | None = None) -> None:
    """Count again what the ledger keeps up to date; a `PageReferenceError` names the first page that disagrees.

    Each page has as many references as rows name it. `cached`, where it is given, are the pages that the engine's
    prefix cache names now: each is published, and no other page is.
    """
    named = [page for request in ledger.requests.values() for page in request.pages if page != NO_PAGE]
    rows = np.bincount(np.array(named, dtype=np.int64), minlength=len(ledger.refcounts))
    for page in (rows != ledger.refcounts).nonzero()[0].tolist():
        count = int(ledger.refcounts[page])
        raise PageReferenceError(
            f"page {page} must have a reference for each row that names it, it has {count} and {rows[page]} rows: "
            "a row was changed without an event",
            page=page,
            refcount=count,
        )
    if cached is not None:
        _audit_cache(ledger, cached)


def _audit_cache(ledger: Ledger, cached: Sequence[int]) -> None:
    is_named = np.zeros(len(ledger.refcounts), dtype=np.bool_)
    is_named[ledger.pages.numbers(cached)] = True
    for page in (is_named != ledger.pages.published).nonzero()[0].tolist():
        last = "".join(f", last {event} ({event.place})" for event in ledger.history.of(page)[-1:])
        names, holds = ("names", "does not hold") if is_named[page] else ("does not name", "holds")
        raise PageReferenceError(
            f"a prefix cache must name the pages that it holds, it {names} page {page} and {holds} it{last}: "
            "share what it takes, evict what it drops",
            page=page,
            refcount=int(ledger.refcounts[page]),
        )
