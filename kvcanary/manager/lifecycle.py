"""Lifecycle: what an engine declares of requests and their pages, from admission to eviction."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np

from kvcanary.errors import HookOrderError, LifetimeError
from kvcanary.ledger.ledger import NO_PAGE, Judged, Request
from kvcanary.ledger.step_book import in_a_row
from kvcanary.manager.reporting import Reporting
from kvcanary.manager.session import Session
from kvcanary.manager.substep import ExpectedForwards
from kvcanary.pools.spans import Span, with_spans
from kvcanary.recorder.recorder import recorded
from kvcanary_kernels.record.layout import FREE, QUARANTINED, Identity

HELD_BACK_STEPS = 1  # that a freed page waits at least, even under pressure: the host is not behind the device


class Lifecycle:
    """The part of a manager that speaks of lifetimes. An event happens to all its pages or is refused for all."""

    def __init__(self, session: Session, reporting: Reporting, expected: ExpectedForwards) -> None:
        self._session, self._reporting, self._expected = session, reporting, expected
        self._state, self._ledger, self._checks = session.state, session.ledger, session.checks
        self.recorder, self._log = session.recorder, session.recorder.log

    # requests

    def admit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        salt: str = "",
        adapter: str = "",
        spans: Sequence[Span] = (),
    ) -> None:
        """A request with its prompt: the host truth of its rows starts.

        `salt` and `adapter` name what makes equal tokens mean other K and V: rows of one are never right for another.
        spans: (start, end, content id) of tokens that are placeholders of an image, sound or embedding: the text in
               front of them is shared as it is, what follows only with rows of the same content. Forwards are told of
               the tokens that they are fed, as everywhere
        PlanError for a span outside the tokens.
        """
        tokens = with_spans(token_ids, spans)
        self.recorder.note("admit", request_id, tokens, *self._ledger.book.identity(salt, adapter))
        if not self._session.is_armed:
            raise HookOrderError(
                f"request {request_id!r} is admitted by a canary that was never armed: "
                "call arm() after warm-up and capture, before the first request"
            )
        self.add(request_id, token_ids, salt, adapter, spans)
        self._reporting.admitted(request_id, len(token_ids))

    def on_weights(self, version: str | int, keeps: Collection[str] | bool = ()) -> None:
        """The weights are another version from now on, between two steps: K and V of another are no row's own.

        version: any name; weights that come back come with their old one, and what was written under it is right again
        keeps: ids of requests that run and go on with what was written under other versions, a mix that is meant; True:
               all that run. The others compute their rows anew before they read them. Pages of a mix are no hit for a
               request that is admitted from now on: R5 or R6, which names both versions
        """
        self._ledger.book.weights = str(version)
        self._change_identities(keeps)

    def on_adapter(self, name: str, version: str | int, keeps: Collection[str] | bool = ()) -> None:
        """As `on_weights`, of the requests of one adapter, whose weights were loaded or replaced under this name.

        version: a digest of its weights, best, or a count of loads: loaded again with equal ones it is the same
        """
        self._ledger.book.adapters[name] = str(version)
        self._change_identities(keeps)

    def append_all(self, request_ids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> None:
        """The same for the requests of a step, each named once, in one call."""
        if len(request_ids) != len(token_ids):
            raise _not_one_each("tokens", request_ids, token_ids)
        batch, (counts, tokens) = self._ledger.batches[tuple(request_ids)], in_a_row(token_ids)
        self._log.append(("append_all", batch.names, counts, tokens))
        self._log.ints += len(counts) + len(tokens)
        self._ledger.steps.append(batch, counts, tokens, self._session.step)

    def commit_all(self, request_ids: Sequence[str], committed_lens: Sequence[int]) -> None:
        """The same for the requests of a step, each named once, in one call; refused for all where one is refused."""
        if len(request_ids) != len(committed_lens):
            raise _not_one_each("a length", request_ids, committed_lens)
        if self._session.open:
            raise self._session.not_closed("commit()")
        batch, lens = self._ledger.batches[tuple(request_ids)], array("q", committed_lens)
        self._log.append(("commit_all", batch.names, lens))
        self._log.ints += len(lens)
        self._checks.commit(batch, lens, self._session.step)

    @recorded
    def release(self, request_id: str, committed_len: int | None = None) -> bool:
        """The request ends, before its last tokens leave: judge what is pending, and re-read all its bytes.

        committed_len: where it ended inside what was accepted (a stop string), entries that are its own: pages behind
                       them are not final, and no cache may take them. Forwards that still have the request in their
                       batch are judged by all that was committed, until its pages are freed.
        Modes abort and heal: False where these are not what was written; the request ends as corrupted, without those
        tokens, or is computed again (`CanaryManager.heals`).
        """
        self._session.expect_closed("release()")
        request = self._ledger.request(request_id)
        if committed_len is not None and not 0 <= committed_len <= request.committed_len:
            raise LifetimeError(
                f"committed_len of {request_id!r} must be in [0, {request.committed_len}] when it ends, got "
                f"{committed_len}: commit first"
            )
        self._checks.reread_request(request, self._session.step)
        if committed_len is not None:
            request.owned_len = committed_len
            request.final_pages = min(request.final_pages, committed_len // self._state.page_size)
        is_intact = request_id not in self._reporting.act()
        self._session.note_live_bytes()
        if is_intact and self._reporting.healing is not None:
            self._reporting.healing.tick(self._session.step)
        request.released = True
        return is_intact

    def commit_states(self, request_ids: Sequence[str], committed_lens: Sequence[int]) -> None:
        """`commit_all` where there are states and no pools: nothing but the lengths."""
        if len(request_ids) != len(committed_lens):
            raise _not_one_each("a length", request_ids, committed_lens)
        for request, length in zip(self._ledger.known(request_ids), committed_lens, strict=True):
            request.committed_len, request.commit_step = int(length), self._session.step

    def release_states(self, request_id: str, committed_len: int | None = None) -> bool:
        """`release` where there are states and no pools: the request is over, its entries are freed by themselves."""
        self._session.expect_closed("release()")
        is_intact = request_id not in self._reporting.act()
        if is_intact and self._reporting.healing is not None:
            self._reporting.healing.tick(self._session.step)
        self.gone(self._ended(request_id), ())
        return is_intact

    def _ended(self, request_id: str) -> Request:
        request = self._ledger.request(request_id)
        request.released = True
        return request

    @recorded
    def on_alloc(self, request_id: str, pages: Sequence[int], for_load: bool = False) -> None:
        """Pages granted, in row order: the row's page i holds positions [i * page_size, (i + 1) * page_size).

        `for_load`: their bytes come from elsewhere (`on_load_begin`), no forward may write them.
        """
        self.grant((request_id,), (pages,), for_load)

    def on_alloc_all(self, request_ids: Sequence[str], pages: Sequence[Sequence[int]]) -> None:
        """The same for several requests, each named once, in one call; refused for all where one is refused."""
        if len(request_ids) != len(pages):
            raise _not_one_each("pages", request_ids, pages)
        counts, granted = in_a_row(pages)
        self._log.append(("on_alloc_all", tuple(request_ids), counts, granted))
        self._log.ints += len(counts) + len(granted)
        self.grant(request_ids, pages)

    @recorded
    def on_free(self, request_id: str, pages: Sequence[int]) -> None:
        """Pages given back; from now on nobody may read them. What a cache or another row holds stays."""
        self._checks.judge_pending()
        self._session.note_live_bytes()
        request = self._ledger.request(request_id)
        if self._count_unread(request, pages) and not request.released:  # preempted: read as if it ended
            self._checks.reread_request(request, self._session.step)
        self._session.async_tracker.freed(pages)
        is_damaged = request.is_damaged
        self._ledger.free(request_id, pages, self._session.step)
        if not (request.pages or request.released):
            self._change_identity(request, self._identity_now(request))
        self.gone(request, pages, is_damaged)

    @recorded
    def on_share(self, request_id: str, pages: Sequence[int]) -> None:
        """A prefix cache takes these final pages too: the row's bytes are read again, then nobody may write them."""
        request = self._ledger.request(request_id)
        self._checks.reread_request(request, self._session.step)
        self._ledger.finalise(request, self._session.step)  # a draft pool catches up after the commit
        self._ledger.share(request_id, pages, self._session.step)

    @recorded
    def on_acquire(self, request_id: str, pages: Sequence[int]) -> None:
        """A cache hit: published pages become the head of the row, and their bytes are read again.

        Before `on_alloc`, of a request that was admitted with its whole prompt; entries on these pages are committed.
        """
        self._checks.judge_pending()
        request = self._ledger.request(request_id)
        self._ledger.acquire(request_id, pages, self._session.step)
        self._inherit(request, len(request.pages) * self._state.page_size)
        self._checks.reread_request(request, self._session.step)

    @recorded
    def on_fork(self, request_id: str, child_id: str, pages: Sequence[int]) -> None:
        """The head of one row becomes the head of another, empty one; neither may write it before `on_copy`.

        Admit the child first, with all tokens of the row so far: the committed length is inherited.
        """
        self._checks.judge_pending()
        parent, child = self._ledger.request(request_id), self._ledger.request(child_id)
        self._ledger.fork(request_id, child_id, pages, self._session.step)
        if child.identity[:2] == parent.identity[:2]:  # what the parent keeps of other versions, it does too
            self._change_identity(child, parent.identity)
        length = min(len(pages) * self._state.page_size, parent.committed_len, len(child.tokens))
        self._inherit(child, length)
        for pool in self._state.pools if length == parent.committed_len else ():
            if pool.view.ahead:  # what its pool holds ahead lies on these pages too
                within = min(len(pages) * self._state.page_size, len(child.tokens))
                child.row_lens[pool.pool_id] = min(parent.final_len(pool.pool_id), within)

    @recorded
    def on_copy(self, request_id: str, page: int, copy: int) -> None:
        """A shared page of the row is replaced by a private copy; move its bytes, and declare that, afterwards.

        `on_move` may name all slots of the page: those that nobody has written arrive unwritten.
        """
        self._checks.judge_pending()
        self._release_early([copy])
        self._ledger.copy_on_write(request_id, page, copy, self._session.step)
        self._begin_grants((request_id,), ((copy,),), [copy])
        request = self._ledger.request(request_id)
        request.judged = [Judged()] * len(request.judged)

    @recorded
    def on_deduplicate(self, request_id: str, page: int, kept: int) -> None:
        """A private final page of the row is replaced by the equal one that a prefix cache holds already, and is free.

        The bytes of both are read again; that they are the same tokens is judged when the row is read.
        """
        request = self._ledger.request(request_id)
        self._checks.reread_request(request, self._session.step)
        self._count_unread(request, [page])
        self._ledger.deduplicate(request_id, [page], [kept], self._session.step)
        self._session.async_tracker.freed([page])
        self._checks.reread_pages([kept], self._session.step)
        self.leave([page], request.is_damaged)
        request.judged = [Judged()] * len(request.judged)

    @recorded
    def on_evict(self, pages: Sequence[int]) -> None:
        """A prefix cache gives up pages that no row names; what a last re-read finds is not their next owner's."""
        self._checks.judge_pending()
        self._checks.reread_pages(pages, self._session.step)
        self._session.async_tracker.freed(pages)
        self._ledger.evict(pages, self._session.step)
        self.leave(pages)
        self._reporting.response.damaged_pages.difference_update(pages)
        if self._reporting.healing is not None:
            self._reporting.healing.evicted(pages, self._session.step)
        if self._session.config.mode != "raise":  # else the check of the step stops the engine
            self._reporting.act()

    # followed by `Contradictions` too, where an event was refused

    def add(
        self, request_id: str, token_ids: Sequence[int], salt: str, adapter: str, spans: Sequence[Span] = ()
    ) -> None:
        tokens = with_spans(token_ids, spans)
        request = self._ledger.admit(request_id, tokens.tolist(), self._session.step, salt, adapter)
        if spans:
            request.given, self._ledger.book.has_spans = np.array(token_ids, np.int64), True
        if self._session.excluded:
            self._session.excluded.forget(request_id)

    def _change_identities(self, keeps: Collection[str] | bool) -> None:
        """Rows of another version begin anew; those without an entry do so at once, and nobody need keep them."""
        self._session.expect_closed("a change of weights")
        self._checks.judge_pending()
        for name, request in self._ledger.requests.items():
            if not (keeps is True or (keeps and name in keeps)) or not any(request.row_lens):
                self._change_identity(request, self._identity_now(request))

    def _identity_now(self, request: Request) -> Identity:
        return self._ledger.book.identity(*request.identity[:2])

    def _change_identity(self, request: Request, identity: Identity) -> None:
        if identity != request.identity:
            self.recorder.note("reroot", request.request_id, *identity)
            self._ledger.book.change_identity(request, identity)

    def grant(self, request_ids: Sequence[str], pages: Sequence[Sequence[int]], for_load: bool = False) -> None:
        granted = [*chain.from_iterable(pages)]
        self._checks.judge_writes_into(granted)
        self._release_early(granted)
        self._ledger.grant_all(request_ids, pages, self._session.step, for_load)
        if for_load:
            self._checks.snapshots.poisoned.update(self._session.poisoner.poisoned.intersection(granted))
        self._begin_grants(request_ids, pages, granted)

    def _begin_grants(self, request_ids: Sequence[str], pages: Sequence[Sequence[int]], granted: Sequence[int]) -> None:
        """Of `granted`, which are all of these pages, the poison is looked at."""
        if self._session.excluded:
            self._session.excluded.granted(request_ids, pages)
        self._checks.report(self._session.poisoner.granted(granted, self._session.step))

    def _inherit(self, request: Request, length: int) -> None:
        """The row begins with `length` entries that others wrote."""
        request.row_lens = [length] * len(request.row_lens)
        request.committed_len, request.commit_step = length, self._session.step

    def _release_early(self, pages: Sequence[int]) -> None:
        """Under pressure an engine grants pages that wait, the longest waiting first."""
        if not self._ledger.quarantined:
            return
        waiting = int((self._ledger.states.take(self._ledger.pages.numbers(pages)) == QUARANTINED).sum())
        if waiting:
            self._ledger.leave_quarantine(self._session.step, self._session.quarantine, waiting, HELD_BACK_STEPS)

    def gone(self, request: Request, pages: Sequence[int], is_damaged: bool = False) -> None:
        """Pages have left the row; `is_damaged`: as of `leave`."""
        self.leave(pages, is_damaged)
        request.judged = [Judged()] * len(request.judged)
        if request.released and not request.pages:
            self._ledger.forget(request.request_id)
            self._session.excluded.forget(request.request_id)
            self._expected.forget(request.uid)

    def leave(self, pages: Sequence[int], is_damaged: bool = False) -> None:
        """Pages that are nobody's now: they wait, they are poisoned, and what was judged there is forgotten.

        `is_damaged`: something was found in what their owner held; what the last re-read at them found says so too
        What was set aside may be somebody's all the same, and stays as it is.
        """
        session, states, excluded = self._session, self._ledger.states, self._session.excluded.pages
        freed = [page for page in pages if page != NO_PAGE and states[page] == FREE and page not in excluded]
        self._checks.forget(freed)
        session.poisoner.freed(freed, is_damaged or len(self._checks.violations) > 0)
        if session.config.poison != "off":
            groups = [group for group, is_undeclared in session.undeclared.items() if is_undeclared]
            undeclared = sum(len(self._state.pools_of(group)) for group in groups)
            session.coverage.skip("freed pages behind a slot map, not poisoned", undeclared * len(freed))
        self._checks.cached.left(pages, session.step)
        if session.quarantine:
            self._ledger.quarantine(freed, session.step)

    def _count_unread(self, request: Request, pages: Sequence[int]) -> int:
        """Committed bytes on those of these pages that are the request's own; nobody reads them where nothing is."""
        size, unread = self._state.page_size, 0
        places = {page: place for place, page in enumerate(request.pages) if page != NO_PAGE}
        own = [places[page] for page in pages if page in places and self._ledger.owners[page] == request.uid]
        for pool in self._state.pools:
            length = request.final_len(pool.pool_id)
            unread += sum(max(0, min(length - place * size, size)) for place in own) * pool.view.slot_bytes
        if self._session.config.content == "write":
            self._session.coverage.freed_unread_bytes += unread
        return unread


def _not_one_each(what: str, request_ids: Sequence[str], values: Sequence[object]) -> LifetimeError:
    return LifetimeError(f"each request must have {what}, got {len(request_ids)} requests and {len(values)} of these")
