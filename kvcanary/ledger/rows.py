"""Rows: which pages each request's row names, in order; the arrays of all pages; and what a row must not name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcanary.errors import PageOwnerError, PageReferenceError
from kvcanary.ledger.page_states import Array, Pages
from kvcanary.ledger.requests import NO_PAGE, Request, RequestBook
from kvcanary.pools.slot_maps import SLOT_BYTES, slots_of_pages


class RowBook:
    """The rows of the live requests over one set of pages, which all pools share."""

    def __init__(self, book: RequestBook, pages: Pages, page_size: int) -> None:
        self._book, self._pages, self._page_size = book, pages, page_size

    def slot(self, request: Request, position: int) -> int:
        """The slot granted for a position, or -1."""
        number, offset = divmod(position, self._page_size)
        if number >= len(request.pages) or request.pages[number] == NO_PAGE:
            return -1
        return request.pages[number] * self._page_size + offset

    def slots(self, request: Request, start: int, end: int) -> list[int]:
        """The slots granted for positions [start, end), without the freed and the not yet granted ones."""
        if self._page_size == 1:
            return [page for page in request.pages[start:end] if page != NO_PAGE]
        granted = request.slots[start:end]
        return granted[granted >= 0].tolist()

    def note_moved(self, pool_id: int, slots: Array, positions: Array) -> None:
        """Entries that a declared move has put at the end of a row are written, as if by a forward.

        positions: those that the entries had where they came from; within what is written nothing changes
        """
        size, pages = self._page_size, slots // self._page_size
        owners = self._pages.owners[pages]
        for uid in self._book.uids.live.keys() & set(owners[run_starts(pages)].tolist()):
            request, is_own = self._book.requests[self._book.uids.live[uid]], owners == uid
            if int(positions[is_own].max()) >= request.row_lens[pool_id]:
                own = slots[is_own]
                starts = run_starts(own // size)
                places = self.places(request, (own[starts] // size).tolist())
                came = np.repeat(places, np.diff(starts, append=len(own))) * size + own % size
                self._lengthen(request, pool_id, own, came)

    def note_brought(self, request: Request, pool_id: int, slots: Array, positions: Array, is_run: bool) -> None:
        """The same of entries that were brought into pages of a row, which are written.

        positions: where they are in it;  is_run: each follows the one before
        """
        size, length = self._page_size, request.row_lens[pool_id]
        if is_run and (self._pages.owners[np.append(slots[::size], slots[-1]) // size] == request.uid).all():
            if positions[0] <= length:
                request.row_lens[pool_id] = max(length, int(positions[-1]) + 1)
            return
        is_own = self._pages.owners[slots // size] == request.uid
        own, came = slots[is_own], positions[is_own]
        if len(own) and int(came.max()) >= length:
            self._lengthen(request, pool_id, own, came)

    def _lengthen(self, request: Request, pool_id: int, slots: Array, positions: Array) -> None:
        """positions: where the slots are in the row, which goes on as far as these follow its end"""
        self._pages.wrote(slots, self._page_size)
        length = request.row_lens[pool_id]
        new = distinct(positions[positions >= length])
        request.row_lens[pool_id] += int((new - np.arange(len(new)) == length).sum())

    def reach(self, pool_id: int, position: int) -> bool:
        """Whether all rows of the pool are written so far, and an entry at this position lengthens none."""
        return all(position < request.row_lens[pool_id] for request in self._book.requests.values())

    def owner_of(self, page: int) -> str | None:
        """The request whose private page it is."""
        owner = int(self._pages.owners[page])
        return self._book.uids.name(owner) if owner >= 0 else None

    def holders(self, page: int) -> tuple[str, ...]:
        """The requests whose rows name the page; looks through all rows, so for reports only."""
        return tuple(name for name, request in self._book.requests.items() if page in request.pages)

    def had(self, page: int, request_id: str) -> bool:
        """Whether the request was given the page once, as far as the page's history goes back."""
        return any(event.request_id == request_id for event in self._pages.history.of(page))

    def holder(self, page: int) -> Request | None:
        """A request whose row names the page; None where a cache alone has it."""
        owner = self.owner_of(page)
        holders = (owner,) if owner is not None else self.holders(page)
        return self._book.requests[holders[0]] if holders else None

    def add(self, request: Request, pages: Array) -> None:
        """Shared pages at the end of the row, with a reference each."""
        self.expect_strange(request, pages)
        self._pages.add_reference(pages, request.uid)
        request.pages += pages.tolist()
        request.row += slots_of_pages(pages, self._page_size).tobytes()

    def replace(self, request: Request, pages: Array, others: Sequence[int]) -> list[int]:
        """Put `others` where `pages` are in the row; their places."""
        places = self.places(request, pages.tolist())
        for place, page in zip(places, others, strict=True):
            request.pages[place] = page
        while request.pages and request.pages[-1] == NO_PAGE:
            request.pages.pop()
        length = len(request.pages)
        request.final_pages = min(request.final_pages, length)
        if length <= min(places, default=length):
            request.row = request.row[: length * self._page_size * SLOT_BYTES]
        else:
            request.row = slots_of_pages(request.pages, self._page_size).tobytes()
        return places

    def places(self, request: Request, pages: list[int]) -> list[int]:
        """Where the row names these pages; at once when they are its tail."""
        first = len(request.pages) - len(pages)
        if request.pages[first:] == pages:
            return list(range(first, len(request.pages)))
        numbers = {page: place for place, page in enumerate(request.pages)}
        return [numbers[page] for page in pages]

    def expect_held(self, event: str, request: Request, pages: Array) -> None:
        """The event is legal for these pages, and they are in the row."""
        self._pages.expect(event, pages, request.request_id)
        shared = pages[self._pages.owners[pages] != request.uid]
        row = set(request.pages) if shared.size else set()
        for page in shared.tolist():
            if page not in row:
                raise self._strange(page, request, f"in its row to be {event}", "name only pages of the row")

    def expect_final(self, request: Request, pages: Array) -> None:
        """These are final pages of the row."""
        head = set(request.pages[: request.final_pages])
        for page in pages.tolist():
            if page not in head:
                rule = f"one of the {request.final_pages} final pages of its row"
                raise self._strange(page, request, rule, "commit it first")

    def expect_strange(self, request: Request, pages: Array) -> None:
        """The row names none of these."""
        for page in set(request.pages).intersection(pages.tolist()):
            raise self._strange(page, request, "new to its row", "a row names a page once")

    def _strange(self, page: int, request: Request, rule: str, remedy: str) -> PageOwnerError:
        name, owner = request.request_id, self.owner_of(page)
        rows = ", ".join(repr(holder) for holder in self.holders(page)) or "nobody"
        return PageOwnerError(
            f"page {page}, named by {name!r}, must be {rule}, it is in the row of {rows}: {remedy}",
            page=page,
            request_id=name,
            owner=owner,
        )

    def expect_published(self, pages: Array) -> None:
        """A prefix cache holds these."""
        for page in pages[~self._pages.published[pages]].tolist():
            raise PageReferenceError(
                f"page {page} must be held by a prefix cache, only rows hold it: share it first",
                page=page,
                refcount=int(self._pages.refcounts[page]),
            )

    def audit(self, cached: Sequence[int] | None = None) -> None:
        """PageReferenceError for the first page that has not as many references as rows name it.

        cached: pages that the engine's prefix cache names now; each must be published, and no other page be
        """
        named = [page for request in self._book.requests.values() for page in request.pages if page != NO_PAGE]
        rows, refcounts = np.bincount(np.array(named, np.int64), minlength=len(self._pages)), self._pages.refcounts
        for page in (rows != refcounts).nonzero()[0].tolist():
            count = int(refcounts[page])
            raise PageReferenceError(
                f"page {page} must have a reference for each row that names it, it has {count} and {rows[page]} rows: "
                "a row was changed without an event",
                page=page,
                refcount=count,
            )
        if cached is not None:
            self._audit_cache(cached)

    def _audit_cache(self, cached: Sequence[int]) -> None:
        is_named = np.zeros(len(self._pages), dtype=np.bool_)
        is_named[self._pages.numbers(cached)] = True
        for page in (is_named != self._pages.published).nonzero()[0].tolist():
            last = "".join(f", last {event} ({event.place})" for event in self._pages.history.of(page)[-1:])
            names, holds = ("names", "does not hold") if is_named[page] else ("does not name", "holds")
            raise PageReferenceError(
                f"a prefix cache must name the pages that it holds, it {names} page {page} and {holds} it{last}: "
                "share what it takes, evict what it drops",
                page=page,
                refcount=int(self._pages.refcounts[page]),
            )


def run_starts(values: Array) -> Array:
    """[runs] where a value differs from the one before it, ascending."""
    is_start = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_start[1:])
    return is_start.nonzero()[0]


def distinct(values: Array) -> Array:
    """`np.unique`, which takes a while, and at once what ascends already."""
    return values if (values[1:] > values[:-1]).all() else np.unique(values)
