"""Ledger: the events in the life of a page, each checked against host truth and written down."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from kvcanary.errors import LifetimeError, PageReferenceError
from kvcanary.ledger.page_states import Array, Pages, taken
from kvcanary.ledger.quarantine import Quarantine
from kvcanary.ledger.requests import NO_PAGE, Judged, Request, RequestBook, Role
from kvcanary.ledger.reread_queue import ReadQueue
from kvcanary.ledger.rows import RowBook
from kvcanary.ledger.step_book import StepBook
from kvcanary_kernels.record.layout import SHARED, Keys

__all__ = ["NO_PAGE", "Judged", "Ledger", "ReadQueue", "Request", "Role"]


class Ledger:
    """Requests by id, pages by number. An event happens to all pages that it names, or is refused for all.

    Truth changes when the caller says so: `step` is only written down, for histories and for the quarantine.

    book:  the requests;  rows: the pages that each names;  steps: what a step changes of them
    pages: states, owners, generations, references and history, by page
    """

    def __init__(self, num_pages: int, page_size: int, null_pages: int, keys: Keys, roles: Sequence[Role]) -> None:
        """`roles`: one a pool."""
        self.page_size, self.null_pages = page_size, null_pages
        self.pages = pages = Pages(num_pages, null_pages)
        self.book = book = RequestBook(keys, roles)
        self.rows, self.steps = RowBook(book, pages, page_size), StepBook(book, pages, page_size)
        self.quarantined = Quarantine()
        self.copies: dict[int, int] = {}  # by page that was last granted as a copy, the page whose place it took
        self.generations, self.owners, self.states = pages.generations, pages.owners, pages.states
        self.refcounts, self.history = pages.refcounts, pages.history
        self.requests, self.batches, self.admit, self.forget = book.requests, book.batches, book.admit, book.forget
        self.request, self.known = book.request, book.known
        self.name, self.has_ended = book.uids.name, book.uids.has_ended
        self.truth, self.truths = book.truth, book.truths
        self.slot, self.slots, self.owner_of = self.rows.slot, self.rows.slots, self.rows.owner_of
        self.holder, self.holders, self.had = self.rows.holder, self.rows.holders, self.rows.had

    # private pages

    def grant(self, request_id: str, pages: Sequence[int] | Array, step: int, for_load: bool = False) -> None:
        """Free pages at the end of the row; `for_load`: not to be written by a forward before a load has failed."""
        self.grant_all((request_id,), (pages,), step, for_load)

    def grant_all(
        self, request_ids: Sequence[str], pages: Sequence[Sequence[int] | Array], step: int, for_load: bool = False
    ) -> None:
        """The same to several requests, each named once; refused for all where it is for one."""
        batch, event = self.batches.once(tuple(request_ids)), "set aside" if for_load else "granted"
        if len(set(request_ids)) < batch.loop_arguments[0]:
            raise LifetimeError(f"an event must name a request once, got {', '.join(request_ids)}")
        counts, where = array("q", map(len, pages)), self._distinct(event, request_ids, pages)
        self.pages.grant_all(event, where, batch, counts, step, self.page_size)
        granted = iter(where.tolist())
        for request, count in zip(batch.requests, counts, strict=True):
            request.pages += islice(granted, count)

    def record_final_pages(self, step: int) -> None:
        """What collected runs did to pages, of all rows, goes into their history."""
        self.pages.record_final_pages(step, self.book.uids.live.__getitem__)

    def free(self, request_id: str, pages: Sequence[int], step: int) -> None:
        """The pages leave the row: private ones are free, shared ones have one reference fewer."""
        request, where = self._held("freed", request_id, pages)
        shared = self.states[where] == SHARED
        self.pages.advance("freed", where[~shared], step, request_id)
        places = self.rows.replace(request, where, [NO_PAGE] * len(where))
        if self.page_size * min(places, default=request.committed_len) < request.committed_len:
            request.lacks_pages = 1
        self._release(request, where[shared], step)
        if not request.pages:
            request.start_anew()

    def finalise(self, request: Request, step: int, committed_len: int | None = None) -> None:
        """Pages that lie wholly in what is final in every pool are not written again.

        committed_len: behind it captured forwards may still be writing; None: nothing is
        """
        length = min(request.final_len(pool_id, committed_len) for pool_id in range(len(request.row_lens)))
        if request.owned_len is not None:
            length = min(length, request.owned_len)
        self.commit(request.request_id, length, step)

    def commit(self, request_id: str, length: int, step: int) -> None:
        """Entries [0, length) are final in every pool: pages that lie wholly in there are written no more."""
        request, full = self.request(request_id), length // self.page_size
        if full <= request.final_pages:
            return
        if full > len(request.pages):
            raise LifetimeError(
                f"request {request_id!r} must hold what it commits, got {length} entries and a row of "
                f"{len(request.pages)} pages of {self.page_size}: grant first"
            )
        fresh = [page for page in request.pages[request.final_pages : full] if page != NO_PAGE]
        where = self.pages.numbers(fresh)
        self.pages.advance("committed", where[self.states[where] != SHARED], step, request_id)
        request.final_pages = full

    # pages of many requests

    def share(self, request_id: str, pages: Sequence[int], step: int) -> None:
        """A prefix cache takes these final pages of the row too; from now on nobody may write them."""
        request, where = self.request(request_id), self.pages.numbers(pages)
        self.pages.expect("published", where, request_id)
        self.rows.expect_final(request, where)
        self.pages.publish(where, step, request_id)

    def acquire(self, request_id: str, pages: Sequence[int], step: int) -> None:
        """A cache hit: published pages become the head of the row, under the grant that they have."""
        request, where = self.request(request_id), self.pages.numbers(pages)
        self.pages.expect("acquired", where, request_id)
        self.rows.expect_published(where)
        if len(request.pages) > request.final_pages:
            raise LifetimeError(f"pages of a cache must be the head of the row of {request_id!r}: acquire before grant")
        self.rows.add(request, where)
        self.pages.advance("acquired", where, step, request_id)
        request.final_pages = len(request.pages)

    def fork(self, request_id: str, child_id: str, pages: Sequence[int], step: int) -> None:
        """The head of a row becomes the head of another, empty row; both may read it and neither may write it."""
        request, child, where = self.request(request_id), self.request(child_id), self.pages.numbers(pages)
        if request.pages[: len(where)] != where.tolist() or child.pages:
            raise LifetimeError(
                f"a fork must take the head of the row of {request_id!r} to the empty row of {child_id!r}, "
                f"got {len(where)} pages and {len(child.pages)} in the other row: fork before acquire and grant"
            )
        self.pages.advance("forked", where, step, child_id)
        self.rows.add(child, where)
        child.final_pages = min(request.final_pages, len(where))

    def copy_on_write(self, request_id: str, page: int, copy: int, step: int) -> None:
        """A shared page of the row is replaced by a private copy; the caller moves bytes and records."""
        (request, where), fresh = self._held("released", request_id, [page]), self.pages.numbers([copy])
        place = request.pages.index(page)
        if place < request.final_pages - 1:
            raise LifetimeError(
                f"a copied page must be the last final one of its row or behind it, page {page} is number {place} of "
                f"{request.final_pages} in the row of {request_id!r}: final entries are not written again"
            )
        self.pages.advance("copied", fresh, step, request_id, request.uid)
        self.copies[copy] = page
        self.rows.replace(request, where, [copy])
        request.final_pages = min(request.final_pages, place)
        self._release(request, where, step)

    def deduplicate(self, request_id: str, pages: Sequence[int], shared: Sequence[int], step: int) -> None:
        """A cache holds these final pages of the row already: the row takes the cache's, its own are free."""
        request, where, cached = self.request(request_id), self.pages.numbers(pages), self.pages.numbers(shared)
        if len(where) != len(cached):
            raise LifetimeError(f"each page must have one that replaces it, got {len(where)} and {len(cached)} pages")
        self.pages.expect("acquired", cached, request_id)
        self.pages.expect("freed", where, request_id)
        self.rows.expect_published(cached)
        self.rows.expect_final(request, where)
        self.rows.expect_strange(request, cached)
        self.rows.replace(request, where, cached.tolist())
        self.pages.add_reference(cached, request.uid)
        self.pages.advance("acquired", cached, step, request_id)
        own = self.states[where] != SHARED
        self.pages.advance("freed", where[own], step, request_id)
        self._release(request, where[~own], step)

    def evict(self, pages: Sequence[int], step: int) -> None:
        """A cache gives up published pages that no row names."""
        where = self.pages.numbers(pages)
        self.pages.expect("evicted", where)
        self.rows.expect_published(where)
        for page in where[self.refcounts[where] > 0].tolist():
            count = int(self.refcounts[page])
            raise PageReferenceError(
                f"page {page} must have no reference to be evicted, it has {count} "
                f"({', '.join(self.holders(page))}): evict what no row names",
                page=page,
                refcount=count,
            )
        self.pages.advance("evicted", where, step)

    # loads

    def load_begin(self, request_id: str, pages: Sequence[int], step: int) -> None:
        """Bytes from elsewhere are on their way into these pages; until `load_end` they must not be read or written."""
        self._advance_held("marked loading", request_id, pages, step)

    def load_end(self, request_id: str, pages: Sequence[int], step: int) -> None:
        """All bytes and their records have arrived."""
        self._advance_held("loaded", request_id, pages, step)

    def load_began(self, page: int) -> int | None:
        """The step in which bytes began to come into it, where they are on their way."""
        last = self.history.of(page)[-1:]
        return next((event.step for event in last if event.kind == "marked loading"), None)

    def load_fail(self, request_id: str, pages: Sequence[int], step: int) -> None:
        """Some bytes did not arrive: the pages must be written, loaded again or freed before anybody reads them."""
        self._advance_held("marked load-failed", request_id, pages, step)

    def restore(self, request_id: str, pages: Sequence[int], step: int) -> None:
        """Bytes and records that were put away are back, at once."""
        self._advance_held("restored", request_id, pages, step)

    # what contradicts all this

    def take_away(self, pages: Sequence[int], step: int) -> set[str]:
        """Pages are nobody's, whatever they were: an engine uses them for something else. Whose rows named them."""
        where, robbed = self.pages.numbers(pages), set[str]()
        for page in where.tolist():
            for name in self.holders(page):
                self.rows.replace(self.requests[name], where[where == page], [NO_PAGE])
                robbed.add(name)
        self.quarantined.remove(where)
        self.pages.advance("taken away", where, step)
        return robbed

    # quarantine

    def quarantine(self, pages: Sequence[int], step: int) -> None:
        """Freed pages wait before they are granted again."""
        where = self.pages.numbers(pages)
        self.pages.advance("quarantined", where, step)
        self.quarantined.add(where, step)

    def leave_quarantine(self, step: int, steps: int, wanted: int = 0, least: int = 0) -> list[int]:
        """Pages that may be granted again: after `steps`; while `wanted` pages are needed, after `least` steps."""
        left = self.quarantined.leave(step, steps, wanted, least)
        if left.size:
            self.pages.advance("left quarantine", left, step)
        return left.tolist()

    # helpers

    def _distinct(self, event: str, request_ids: Sequence[str], pages: Sequence[Sequence[int] | Array]) -> Array:
        """`Pages.numbers` of all of them; the second request to name a page comes to one that is not free any more."""
        named = [*chain.from_iterable(pages)]
        if len(pages) > 1 and len(set(named)) < len(named):
            granted = dict[int, str]()
            for request_id, own in zip(request_ids, pages, strict=True):
                where = self.pages.numbers(own)
                self.pages.expect(event, where, request_id)
                for page in where.tolist():
                    if granted.setdefault(page, request_id) != request_id:
                        raise taken(event, page, request_id, granted[page])
        return self.pages.numbers(named)

    def _held(self, event: str, request_id: str, pages: Sequence[int]) -> tuple[Request, Array]:
        """A request and pages of its row, to which the event may happen."""
        request, where = self.request(request_id), self.pages.numbers(pages)
        self.rows.expect_held(event, request, where)
        return request, where

    def _advance_held(self, event: str, request_id: str, pages: Sequence[int], step: int) -> None:
        _, where = self._held(event, request_id, pages)
        self.pages.advance(event, where, step, request_id)

    def _release(self, request: Request, pages: Array, step: int) -> None:
        """One reference fewer; with one left, a page that no cache holds is private again: two rows had it before."""
        if not pages.size:
            return
        self.pages.drop_reference(pages, request.uid)
        self.pages.advance("released", pages, step, request.request_id)
        for number in pages[~self.pages.published[pages] & (self.refcounts[pages] == 1)].tolist():
            page, owner = np.array([number]), int(self.pages.holder_sums[number])  # the uid of the only row left
            last = self.requests[self.book.uids.live[owner]]
            self.pages.owners[number] = owner
            self.pages.advance("taken back", page, step, last.request_id)
            if last.pages.index(number) < last.final_pages:
                self.pages.advance("committed", page, step, last.request_id)
