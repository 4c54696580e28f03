"""Lifecycle: what an engine tells of requests and pages, from admission to eviction."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.forward import on_host
from kvcanary.calls.set_aside import SetAside
from kvcanary.config import CanaryConfig
from kvcanary.errors import HookOrderError, LifetimeError, PlanError
from kvcanary.ledger.ledger import NO_PAGE, Judged, Ledger, Request, Role
from kvcanary.ledger.step_book import in_a_row
from kvcanary.manager.expected_forwards import ExpectedForwards
from kvcanary.manager.step import StepChecks
from kvcanary.manager.substep import SubstepCanary
from kvcanary.recorder.checkpoint import Books
from kvcanary.recorder.recorder import Recorder, recorded
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.poison import Poisoner
from kvcanary.transfers.async_tracker import AsyncTracker
from kvcanary.transfers.imports import adopt
from kvcanary.transfers.snapshots import Parcel
from kvcanary_kernels.record.layout import FREE, QUARANTINED

HELD_BACK_STEPS = 1  # that a freed page waits at least, even under pressure: the host is not behind the device


class Lifecycle:
    """The half of CanaryManager that speaks of lifetimes. An event happens to all its pages or is refused for all."""

    def __init__(self, config: CanaryConfig, state: CanaryState, holds_back: bool) -> None:
        """`holds_back`: the engine grants a freed page again after `config.quarantine` steps, sooner when it must."""
        self.config = config
        self.step = 0
        self.is_armed = False
        self._state = state
        self._ledger = Ledger(
            num_pages=state.generations.shape[0],
            page_size=state.page_size,
            null_pages=-(-max(pool.view.null_slots for pool in state.pools) // state.page_size),
            keys=state.keys,
            roles=[Role(pool.view.root_name, pool.view.token_offset, pool.view.ahead) for pool in state.pools],
        )
        state.bind(self._ledger.pages)
        self._coverage = Coverage()
        self._aside = SetAside(self._coverage)
        self._checks = StepChecks(state, self._ledger, config, self._coverage, self._aside)
        told = config.poison, self._coverage, self._checks.looks, self._checks.tails
        self._poisoner = Poisoner(state, state.pools_of(None), *told)
        groups = {pool.view.group for pool in state.pools if pool.view.slot_map is not None}
        self._mapped = {group: Poisoner(state, state.pools_of(group), *told) for group in groups}
        self._poisoners = self._poisoner, *self._mapped.values()
        self._untold = dict.fromkeys(self._mapped, True)  # groups of which no `on_map` has told
        self._quarantine = config.quarantine if holds_back else 0
        self._expected = ExpectedForwards(state.by_name)
        self._open: list[SubstepCanary] = []  # several where the layers of one model lie in pools of several groups
        self.tickets = AsyncTracker(self._ledger, state.pools[0], self._checks.report)
        books = Books(state, self._ledger, self._checks, self.tickets, self._poisoner, self._mapped, self._untold)
        self.recorder = Recorder(books, config.ring)
        self._checks.hits.watch = self.recorder.fired
        self._checks.judged, self._checks.proved = self.recorder.judged, self.recorder.proved
        self._checks.landing = self.recorder.captured.landing
        self.tickets.note, self.tickets.log = self.recorder.note, self.recorder.log
        self._log = self.recorder.log

    # requests

    def admit(self, request_id: str, token_ids: Sequence[int], salt: str = "", adapter: str = "") -> None:
        """A request with its prompt: the host truth of its rows starts.

        `salt` and `adapter` name what makes equal tokens mean other K and V: rows of one are never right for another.
        """
        tokens = np.array(token_ids, np.int64)
        self.recorder.note("admit", request_id, tokens, salt, adapter)
        if not self.is_armed:
            raise HookOrderError(
                f"request {request_id!r} is admitted by a canary that was never armed: "
                "call arm() after warm-up and capture, before the first request"
            )
        self._admit(request_id, tokens.tolist(), salt, adapter)

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens that were accepted for this request; where the device has told of them, the same are expected."""
        self.append_all((request_id,), (token_ids,))

    def append_all(self, request_ids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> None:
        """The same for the requests of a step, each named once, in one call."""
        if len(request_ids) != len(token_ids):
            raise _not_one_each("tokens", request_ids, token_ids)
        batch, (counts, tokens) = self._ledger.batches[tuple(request_ids)], in_a_row(token_ids)
        self._log.append(("append_all", batch.names, counts, tokens))
        self._log.ints += len(counts) + len(tokens)
        self._ledger.append(batch, counts, tokens, self.step)

    def commit(self, request_id: str, committed_len: int) -> None:
        """Entries [0, committed_len) of the row are final; at acceptance, be the step checked already or not."""
        self.commit_all((request_id,), (committed_len,))

    def commit_all(self, request_ids: Sequence[str], committed_lens: Sequence[int]) -> None:
        """The same for the requests of a step, each named once, in one call; refused for all where one is refused."""
        if len(request_ids) != len(committed_lens):
            raise _not_one_each("a length", request_ids, committed_lens)
        if self._open:
            raise self._not_closed("commit()")
        batch, lens = self._ledger.batches[tuple(request_ids)], array("q", committed_lens)
        self._log.append(("commit_all", batch.names, lens))
        self._log.ints += len(lens)
        self._checks.commit(batch, lens, self.step)

    # pages of one request

    @recorded
    def on_alloc(self, request_id: str, pages: Sequence[int], for_load: bool = False) -> None:
        """Pages granted, in row order: the row's page i holds positions [i * page_size, (i + 1) * page_size).

        `for_load`: their bytes come from elsewhere (`on_load_begin`), no forward may write them.
        """
        self._grant((request_id,), (pages,), for_load)

    def on_alloc_all(self, request_ids: Sequence[str], pages: Sequence[Sequence[int]]) -> None:
        """The same for several requests, each named once, in one call; refused for all where one is refused."""
        if len(request_ids) != len(pages):
            raise _not_one_each("pages", request_ids, pages)
        counts, granted = in_a_row(pages)
        self._log.append(("on_alloc_all", tuple(request_ids), counts, granted))
        self._log.ints += len(counts) + len(granted)
        self._grant(request_ids, pages)

    @recorded
    def on_free(self, request_id: str, pages: Sequence[int]) -> None:
        """Pages given back; from now on nobody may read them. What a cache or another row holds stays."""
        self._checks.settle()
        self._note_live_bytes()
        request = self._ledger.request(request_id)
        if not request.released and self._unread_bytes(request, pages):  # preempted: read as if it ended
            self._checks.look_again(request, self.step)
        if self.config.content == "write":
            self._coverage.freed_unread_bytes += self._unread_bytes(request, pages)
        self.tickets.freed(pages)
        is_damaged = request.is_damaged
        self._ledger.free(request_id, pages, self.step)
        self._gone(request, pages, is_damaged)

    # pages of many

    @recorded
    def on_share(self, request_id: str, pages: Sequence[int]) -> None:
        """A prefix cache takes these final pages too: the row's bytes are read again, then nobody may write them."""
        request = self._ledger.request(request_id)
        self._checks.look_again(request, self.step)
        self._ledger.finalise(request, self.step)  # a draft pool catches up after the commit
        self._ledger.share(request_id, pages, self.step)

    @recorded
    def on_acquire(self, request_id: str, pages: Sequence[int]) -> None:
        """A cache hit: published pages become the head of the row, and their bytes are read again.

        Before `on_alloc`, of a request that was admitted with its whole prompt; entries on these pages are committed.
        """
        self._checks.settle()
        request = self._ledger.request(request_id)
        self._ledger.acquire(request_id, pages, self.step)
        self._inherit(request, len(request.pages) * self._state.page_size)
        self._checks.look_again(request, self.step)

    @recorded
    def on_fork(self, request_id: str, child_id: str, pages: Sequence[int]) -> None:
        """The head of one row becomes the head of another, empty one; neither may write it before `on_copy`.

        Admit the child first, with all tokens of the row so far: the committed length is inherited.
        """
        self._checks.settle()
        parent, child = self._ledger.request(request_id), self._ledger.request(child_id)
        self._ledger.fork(request_id, child_id, pages, self.step)
        length = min(len(pages) * self._state.page_size, parent.committed_len, len(child.tokens))
        self._inherit(child, length)
        for pool in self._state.pools:
            if pool.view.ahead and length == parent.committed_len:  # what its pool holds ahead lies on these pages too
                within = min(len(pages) * self._state.page_size, len(child.tokens))
                child.row_lens[pool.pool_id] = min(parent.final_len(pool.pool_id), within)

    @recorded
    def on_copy(self, request_id: str, page: int, copy: int) -> None:
        """A shared page of the row is replaced by a private copy; move its bytes, and tell of it, afterwards.

        `on_move` may name all slots of the page: those that nobody has written arrive unwritten.
        """
        self._checks.settle()
        self._release_early([copy])
        self._ledger.copy_on_write(request_id, page, copy, self.step)
        if self._aside:
            self._aside.granted((request_id,), ((copy,),))
        self._checks.report(self._poisoner.granted([copy], self.step))
        request = self._ledger.request(request_id)
        request.judged = [Judged()] * len(request.judged)

    @recorded
    def on_deduplicate(self, request_id: str, page: int, kept: int) -> None:
        """A private final page of the row is replaced by the equal one that a prefix cache holds already, and is free.

        The bytes of both are read again; that they are the same tokens is judged when the row is read.
        """
        request = self._ledger.request(request_id)
        self._checks.look_again(request, self.step)
        if self.config.content == "write":
            self._coverage.freed_unread_bytes += self._unread_bytes(request, [page])
        self._ledger.deduplicate(request_id, [page], [kept], self.step)
        self.tickets.freed([page])
        self._checks.look_at_pages([kept], self.step)
        self._leave([page], request.is_damaged)
        request.judged = [Judged()] * len(request.judged)

    # pages of a group behind a slot map

    @recorded
    def on_map(self, group: str, pages: Sequence[int], own_pages: Sequence[int]) -> None:
        """Full pages are granted with free pages of the group, where the map leads now; before their `on_alloc`.

        An engine that tells of none has what the group frees left alone, and counted as not poisoned.
        """
        hits = self._of_group(group).granted(own_pages, self.step, pages)
        self._untold[group] = False
        self._checks.enter(group, own_pages)
        self._checks.report(hits)

    @recorded
    def on_swap_out(self, group: str, pages: Sequence[int]) -> list[Parcel]:
        """Bytes that these full pages have in the group are about to be copied elsewhere: a parcel for each page.

        The pages stay granted: `on_unmap` tells when the group gives up its own ones, and reading one is R2 then, until
        `on_map` and `on_swap_in` tell that it is back. The parcel of a page that is written again is of no use.
        """
        self._of_group(group)
        parcels = self._checks.pack(pages, self.step, group).each()
        for parcel in parcels:
            self.recorder.number_parcel(parcel)
        return parcels

    @recorded
    def on_swap_in(self, group: str, pages: Sequence[int], parcels: Sequence[Parcel] | None) -> None:
        """Bytes of full pages that were granted all the while lie where the map leads since `on_map`.

        `parcels`: of `on_swap_out`, one for each page: the records of then come back, and bytes that are not those of
        then are T1. None: bytes are fingerprinted as they lie.
        """
        self._of_group(group)
        if parcels is not None:
            self._checks.expect_own(parcels, pages, group)
        self._checks.settle()
        if parcels is None:
            self._adopt_again(group, pages)
        else:
            self._checks.unpack_group(group, parcels, pages, self.step)

    # bytes from elsewhere

    @recorded
    def on_load_begin(self, request_id: str, pages: Sequence[int]) -> None:
        """Bytes are on their way into these pages of the row; reading one of them is R12 until `on_load_end`."""
        self._checks.settle()
        self._ledger.load_begin(request_id, pages, self.step)

    @recorded
    def on_offload(self, pages: Sequence[int]) -> Parcel:
        """Bytes of these pages are about to be copied elsewhere; give the parcel to the `on_load_end` of the way back.

        The pages stay what they are: free or evict them, when the copy is done, as any others.
        """
        parcel = self._checks.pack(pages, self.step)
        self.recorder.number_parcel(parcel)
        return parcel

    @recorded
    def on_load_end(self, request_id: str, pages: Sequence[int], length: int, parcel: Parcel | None = None) -> None:
        """They have arrived: positions below `length` hold the request's own tokens.

        `parcel`: of `on_offload`, of as many pages in the same order: the records of then come back, and bytes that
        are not those of then are T1. Without it bytes are fingerprinted as they lie: nothing can tell whether they
        were damaged on their way.
        """
        if parcel is not None:
            self._checks.expect_own([parcel], pages)
        self._checks.settle()
        self._ledger.load_end(request_id, pages, self.step)
        if parcel is None:
            self._adopt(request_id, pages, length)
        else:
            self._checks.unpack("load", parcel, self._ledger.request(request_id), pages, length, self.step)

    @recorded
    def on_load_fail(self, request_id: str, pages: Sequence[int]) -> None:
        """They did not arrive: these pages must be written, loaded again or freed before anybody reads them."""
        self._checks.settle()
        self._ledger.load_fail(request_id, pages, self.step)

    @recorded
    def on_restore(self, request_id: str, pages: Sequence[int], length: int, parcel: Parcel) -> None:
        """Bytes that were put away lie in these pages of the row, granted and not yet written: their records follow.

        As `on_load_begin` and `on_load_end` with a parcel, where nothing can read the pages in between.
        """
        self._checks.expect_own([parcel], pages)
        self._checks.settle()
        self._ledger.restore(request_id, pages, self.step)
        self._checks.unpack("restore", parcel, self._ledger.request(request_id), pages, length, self.step)

    @recorded
    def before_move(self) -> None:
        """Bytes that a forward of this step wrote are about to move: what is pending is judged where they lie now."""
        self._expect_closed("before_move()")
        self._checks.settle()

    @recorded
    def on_move(self, pool: str, src: Tensor, dst: Tensor, to: str | None = None, guesses: bool = False) -> None:
        """Bytes were moved, every source read before any destination was written: the records follow.

        `to`: another pool of equal rows, where `dst` are slots of it. What arrived is read again at once (T1). Under
        content=full what pending forwards have read in `dst` is lost, where nobody called `before_move`.
        `guesses`: entries of draft forwards, which lengthen no row; their bytes are read under content "full" alone.
        """
        self._expect_closed("on_move()")
        source, target = self._pool(pool), self._pool(pool if to is None else to)
        if source is not target:
            _expect_equal_rows(source, target)
        self._checks.move(source, target, on_host(src), on_host(dst), self.step, guesses)

    # helpers

    def _admit(self, request_id: str, token_ids: Sequence[int], salt: str, adapter: str) -> None:
        self._ledger.admit(request_id, token_ids, self.step, salt, adapter)
        if self._aside:
            self._aside.forget(request_id)

    def _grant(self, request_ids: Sequence[str], pages: Sequence[Sequence[int]], for_load: bool = False) -> None:
        granted = [*chain.from_iterable(pages)]
        self._checks.settle_writes_into(granted)
        self._release_early(granted)
        self._ledger.grant_all(request_ids, pages, self.step, for_load)
        if self._aside:
            self._aside.granted(request_ids, pages)
        if for_load:
            self._checks.expect_load(self._poisoner.poisoned.intersection(granted))
        self._checks.report(self._poisoner.granted(granted, self.step))

    def _expect_closed(self, what: str) -> None:
        if self._open:
            raise self._not_closed(what)

    def _not_closed(self, what: str) -> HookOrderError:
        """What `_expect_closed` raises, where a step looks at `_open` itself: one call fewer."""
        return HookOrderError(f"{what} must wait for close() of {self._open[-1]}")

    def _of_group(self, name: str) -> Poisoner:
        poisoner = self._mapped.get(name)
        if poisoner is None:
            groups = ", ".join(sorted(self._mapped)) or "there is none"
            raise PlanError(f"group must be one behind a slot map, {groups}, got {name!r}: name that of its view")
        return poisoner

    def _pool(self, name: str) -> PoolState:
        pool = self._state.by_name.get(name)
        if pool is None:
            raise PlanError(f"pool must be one of {', '.join(self._state.by_name)}, got {name!r}")
        return pool

    def _inherit(self, request: Request, length: int) -> None:
        """The row begins with `length` entries that others wrote."""
        request.row_lens = [length] * len(request.row_lens)
        request.committed_len, request.commit_step = length, self.step

    def _adopt(self, request_id: str, pages: Sequence[int], length: int) -> None:
        request = self._ledger.request(request_id)
        size = self._state.page_size
        places = sorted(request.pages.index(page) for page in pages)
        positions = np.array([p for place in places for p in range(place * size, (place + 1) * size) if p < length])
        for pool in self._state.pools:
            adopt(self._ledger, self._checks.mirror, self._state, pool, request, positions, self.step)
            request.row_lens[pool.pool_id] = max(request.row_lens[pool.pool_id], length)

    def _adopt_again(self, group: str, pages: Sequence[int]) -> None:
        size = self._state.page_size
        for page in pages:
            request = self._ledger.holder(page)
            if request is None:
                continue
            first = request.pages.index(page) * size
            for pool in self._state.pools_of(group):
                positions = np.arange(first, min(first + size, request.final_len(pool.pool_id)))
                adopt(self._ledger, self._checks.mirror, self._state, pool, request, positions, self.step)

    def _release_early(self, pages: Sequence[int]) -> None:
        """Under pressure an engine grants pages that wait, the longest waiting first."""
        if not self._ledger.quarantined:
            return
        waiting = int((self._ledger.states.take(self._ledger.pages.numbers(pages)) == QUARANTINED).sum())
        if waiting:
            self._ledger.leave_quarantine(self.step, self._quarantine, waiting, HELD_BACK_STEPS)

    def _gone(self, request: Request, pages: Sequence[int], is_damaged: bool = False) -> None:
        """Pages have left the row; `is_damaged`: as of `_leave`."""
        self._leave(pages, is_damaged)
        request.judged = [Judged()] * len(request.judged)
        if request.released and not request.pages:
            self._ledger.forget(request.request_id)
            self._aside.forget(request.request_id)
            self._expected.forget(request.uid)

    def _leave(self, pages: Sequence[int], is_damaged: bool = False) -> None:
        """Pages that are nobody's now: they wait, they are poisoned, and what was judged there is forgotten.

        `is_damaged`: something was found in what their owner held; what the last look at them found says so too
        What was set aside may be somebody's all the same, and stays as it is.
        """
        freed = [page for page in pages if page != NO_PAGE and self._ledger.states[page] == FREE]
        if self._aside.pages:
            freed = [page for page in freed if page not in self._aside.pages]
        self._checks.forget(freed)
        self._poisoner.freed(freed, is_damaged or len(self._checks.hits) > 0)
        if self._mapped and self.config.poison != "off":
            untold = sum(len(self._state.pools_of(group)) for group, is_untold in self._untold.items() if is_untold)
            self._coverage.skip("freed pages behind a slot map, not poisoned", untold * len(freed))
        self._checks.cached.left(pages, self.step)
        if self._quarantine:
            self._ledger.quarantine(freed, self.step)

    def _note_live_bytes(self) -> None:
        """Before they become fewer, and where somebody asks for the most that there were."""
        self._coverage.peak_live_bytes = max(self._coverage.peak_live_bytes, self._checks.sweeper.live_bytes())

    def _unread_bytes(self, request: Request, pages: Sequence[int]) -> int:
        """Committed bytes on those of these pages that are the request's own."""
        size, unread = self._state.page_size, 0
        places = {page: place for place, page in enumerate(request.pages) if page != NO_PAGE}
        own = [places[page] for page in pages if page in places and self._ledger.owners[page] == request.uid]
        for pool in self._state.pools:
            length = request.final_len(pool.pool_id)
            slots = sum(max(0, min(length - place * size, size)) for place in own)
            unread += slots * pool.view.slot_bytes
        return unread


def _not_one_each(what: str, request_ids: Sequence[str], values: Sequence[object]) -> LifetimeError:
    return LifetimeError(f"each request must have {what}, got {len(request_ids)} requests and {len(values)} of these")


def _expect_equal_rows(source: PoolState, target: PoolState) -> None:
    """Fingerprints name content wherever it lies, but only among pools whose rows have the same shape."""
    shapes = [(pool.view.num_layers, pool.rows.words_per_row) for pool in (source, target)]
    if shapes[0] != shapes[1]:
        raise PlanError(
            f"a move must be between pools of equal rows: {source.name!r} has {shapes[0][0]} layers of {shapes[0][1]} "
            f"words, {target.name!r} {shapes[1][0]} of {shapes[1][1]}"
        )
