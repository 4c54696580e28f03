"""Contradictions: what an engine declares and cannot be; an error in mode `raise`, in `log` and `abort` a finding (L1).

`errors.ENGINES_DOING` says which errors these are, and which stay errors in every mode. After an L1 the canary follows
the engine as far as it can: an event happens to those of its pages to which it may, a grant always happens, and what is
not known any more is set aside (`set_aside`).
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakMethod

import numpy as np
from torch import Tensor

from kvcanary.calls.forward import on_host
from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.captured.in_flight import InFlight
from kvcanary.errors import ENGINES_DOING, HookOrderError, LifetimeError, PageStateError, UnknownRequestError
from kvcanary.ledger.ledger import NO_PAGE
from kvcanary.ledger.page_states import EVENTS, STATE_NAMES
from kvcanary.ledger.requests import Batch
from kvcanary.manager.lifecycle import Lifecycle
from kvcanary.manager.reporting import Reporting
from kvcanary.manager.session import Refusal, Session, Where
from kvcanary.pools.plans import ReadPlan, WritePlan
from kvcanary.pools.slot_maps import locate_slots
from kvcanary.records.state import PoolState
from kvcanary.transfers.snapshots import PageSnapshot
from kvcanary_kernels.record.layout import FREE, LOAD_FAILED, LOADING, NEVER_WRITTEN, QUARANTINED, SHARED

EVENT_SITE = "event", 0
Given = dict[str, Any]
Follow = Callable[["Contradictions", Given], Any]
T = TypeVar("T")


class Contradictions:
    """Stands between an engine and the hooks of its canary, in modes that end nobody for what the engine did."""

    def __init__(self, session: Session, lifecycle: Lifecycle, reporting: Reporting) -> None:
        self._session, self._lifecycle, self._reporting = session, lifecycle, reporting
        self._ledger, self._checks, self._excluded = session.ledger, session.checks, session.excluded

    def guard(self, manager: object) -> None:
        """Put each hook of this manager behind the one door through which its errors come."""
        for name, follow in FOLLOW.items():
            setattr(manager, name, self._guarded(getattr(manager, name), follow))

    def _guarded(self, method: Callable[..., Any], follow: Follow) -> Callable[..., Any]:
        method_of = WeakMethod(method)  # who drops a manager has dropped it

        @wraps(method)
        def hook(*args: Any, **kwargs: Any) -> Any:
            method = method_of()
            if method is None:
                raise HookOrderError("the manager of these hooks is gone: keep it as long as its engine runs")
            try:
                return method(*args, **kwargs)
            except ENGINES_DOING as error:
                bound = inspect.signature(method).bind(*args, **kwargs)
                bound.apply_defaults()
                requests, pages = _named(bound.arguments)
                if isinstance(error, UnknownRequestError):
                    self._bring_back(error, requests)
                    return hook(*args, **kwargs)
                self._hook, self._error = method, error
                self._requests, self._pages = requests, self._inside(pages)
                return follow(self, bound.arguments)

        return hook

    def refused_plan(
        self, error: Refusal, where: Where, read: ReadPlan, write: WritePlan
    ) -> tuple[Tensor, Tensor] | None:
        """A forward whose plans cannot be: what it may use all the same; None where it is to be opened again.

        Nobody judges what it reads and writes, and its requests are set aside.
        """
        if isinstance(error, UnknownRequestError):
            self._bring_back(error, read.requests)
            return None
        culprits = getattr(error, "request_ids", ()) or read.requests
        kind, index, pool = where
        self._report_contradiction(error, culprits, (), (kind, index), pool)
        self._exclude(read.requests)
        self._session.coverage.skip("forwards whose plans contradict themselves", 1)
        safe = [ids.where(~locate_slots(pool.view, ids)[1], 0) for ids in (read.indices, write.slots)]
        return safe[0], safe[1]

    # what is told

    def _report_contradiction(
        self,
        error: Exception,
        requests: Iterable[str],
        pages: Sequence[int],
        site: tuple[str, int] = EVENT_SITE,
        pool: PoolState | None = None,
    ) -> None:
        """One L1 that names them and whoever holds these pages, unless one of them was set aside before."""
        requests = list(requests)
        if self._excluded.is_known(requests, pages):
            return
        state, page = self._session.state, getattr(error, "page", pages[0] if pages else None)
        names = list(dict.fromkeys([*requests, *(name for own in pages for name in self._ledger.holders(own))]))
        violation = Violation(
            "L1",
            state.pools[0] if pool is None else pool,
            NO_SLOT if page is None else page * state.page_size,
            None,
            names[0] if names else None,
            site,
            self._session.step,
            others=tuple(names[1:]),
            message=str(error),
        )
        violation.expected, violation.found = _sides(error)
        self._checks.report([violation])

    def _bring_back(self, error: UnknownRequestError, requests: Sequence[str]) -> None:
        """Requests that have ended, and of which an engine still speaks: stand-ins, set aside from the beginning.

        The error where one of these was never admitted.
        """
        ended = [name for name in requests if name not in self._ledger.requests]
        if not all(map(self._ledger.has_ended, ended)):
            raise error
        self._report_contradiction(error, ended, ())
        for name in ended:
            self._ledger.admit(name, (), self._session.step).released = True
        self._excluded.add(ended, ())

    def _exclude(self, requests: Iterable[str], pages: Iterable[int] = ()) -> None:
        """These, and the private pages of the requests."""
        pages, ledger = set(pages), self._ledger
        for name in requests:
            if (request := ledger.requests.get(name)) is not None:
                own = (page for page in request.pages if page != NO_PAGE and ledger.owners[page] == request.uid)
                pages.update(own)
        self._excluded.add(requests, pages)

    def _inside(self, pages: Iterable[int]) -> list[int]:
        """Those of these pages that may be granted at all, each once."""
        first, end = self._ledger.null_pages, len(self._ledger.pages)
        return [page for page in dict.fromkeys(map(int, pages)) if first <= page < end]

    def _refused(self, names: Iterable[T], happen: Callable[[T], object]) -> Iterator[T]:
        """An event that was refused for all happens to those to which it may; these are the others.

        The first of them was meant by the error that there is already.
        """
        is_first = True
        for name in names:
            try:
                happen(name)
            except ENGINES_DOING as error:
                self._error, is_first = self._error if is_first else error, False
                yield name

    # how an event is followed all the same

    def _exclude_all(self, given: Given) -> None:
        """What it names is set aside."""
        self._report_contradiction(self._error, self._requests, self._pages)
        self._exclude(self._requests, self._pages)

    def _admit(self, given: Given) -> None:
        """A stand-in of a request that has ended makes room; a request that lives is judged no more."""
        name = given["request_id"]
        request = self._ledger.request(name)
        if name not in self._excluded.requests or not request.released:
            return self._exclude_all(given)
        self._take_away([page for page in request.pages if page != NO_PAGE])
        self._ledger.forget(name)
        return self._lifecycle.add(*(given[own] for own in ("request_id", "token_ids", "salt", "adapter", "spans")))

    def _commit(self, given: Given) -> None:
        lens = given["committed_lens"]
        if len(self._requests) != len(lens):
            return self._exclude_all(given)

        def commit(event: tuple[str, int]) -> None:
            self._checks.commit(Batch([self._ledger.request(event[0])]), array("q", event[1:]), self._session.step)

        for name, _ in self._refused(zip(self._requests, lens, strict=True), commit):
            self._report_contradiction(self._error, [name], ())
            self._exclude([name])
        return None

    def _grant(self, given: Given) -> None:
        pages, for_load = [given["pages"]] if "request_id" in given else given["pages"], given.get("for_load", False)
        if len(pages) != len(self._requests):
            return self._exclude_all(given)

        def grant(event: tuple[str, Sequence[int]]) -> None:
            self._lifecycle.grant(event[:1], event[1:], for_load)

        for name, own in self._refused(zip(self._requests, pages, strict=True), grant):
            self._report_contradiction(self._error, [name], self._inside(own))
            self._grant_anyway(name, own, for_load)
        return None

    def _grant_anyway(self, name: str, pages: Sequence[int], for_load: bool = False) -> None:
        """An engine's word on who has a page now: whoever had it is set aside, and the row if it is not as told."""
        request = self._ledger.request(name)
        new = [page for page in self._inside(pages) if page not in request.pages]
        self._exclude(self._take_away([page for page in new if self._ledger.states[page] != FREE]))
        if new != list(pages):
            self._exclude([name])
        self._lifecycle.grant((name,), (new,), for_load and name not in self._excluded.requests)

    def _take_away(self, pages: Sequence[int]) -> set[str]:
        """Pages are nobody's; the requests that had them."""
        if not pages:
            return set()
        self._checks.judge_pending()
        self._session.async_tracker.freed(pages)
        robbed = self._ledger.take_away(pages, self._session.step)
        self._checks.forget(pages)
        self._checks.cached.left(pages, self._session.step)
        self._reporting.response.damaged_pages.difference_update(pages)
        return robbed

    def _free(self, given: Given) -> None:
        """Pages of the row leave it; those of others stay theirs, and are set aside."""
        name, ledger = given["request_id"], self._ledger
        request = ledger.request(name)
        self._report_contradiction(self._error, [name], self._pages)
        own = [page for page in self._pages if page in request.pages]
        nobodys = FREE, QUARANTINED
        self._exclude((), [p for p in self._pages if p not in own and ledger.states[p] not in nobodys])
        may_go = [page for page in own if ledger.states[page] in EVENTS["freed"].after]
        ledger.free(name, may_go, self._session.step)
        self._take_away([page for page in own if page not in may_go])
        self._lifecycle.gone(request, own)

    def _share(self, given: Given) -> None:
        name, step = given["request_id"], self._session.step
        for page in self._refused(self._pages, lambda page: self._ledger.share(name, [page], step)):
            self._report_contradiction(self._error, [name], [page])
            self._exclude((), [page])

    def _acquire(self, given: Given) -> None:
        """The row is not known; pages that a cache really holds are."""
        self._report_contradiction(self._error, self._requests, self._pages)
        self._exclude(self._requests, [page for page in self._pages if self._ledger.states[page] != SHARED])

    def _fork(self, given: Given) -> None:
        self._report_contradiction(self._error, self._requests, self._pages)
        self._exclude([given["child_id"]], self._pages)

    def _copy(self, given: Given) -> None:
        self._report_contradiction(self._error, self._requests, self._pages)
        self._exclude(self._requests, self._inside([given["page"]]))
        self._grant_anyway(given["request_id"], [given["copy"]])

    def _evict(self, given: Given) -> None:
        step, refused = self._session.step, set[int]()
        for page in self._refused(self._pages, lambda page: self._ledger.evict([page], step)):
            refused.add(page)
            self._report_contradiction(self._error, (), [page])
            if self._ledger.states[page] not in (FREE, QUARANTINED):
                self._exclude((), [page])
        if len(self._pages) < len(given["pages"]):
            self._report_contradiction(self._error, (), ())
        self._lifecycle.leave([page for page in self._pages if page not in refused])
        self._reporting.response.damaged_pages.difference_update(self._pages)

    def _load(self, given: Given) -> None:
        """Nobody knows what lies there, but forwards of the request may go on behind it."""
        self._exclude_all(given)
        request = self._ledger.request(given["request_id"])
        loads = {NEVER_WRITTEN: "restored", LOADING: "loaded", LOAD_FAILED: "written"}
        for page in np.array(self._pages, np.int64):
            event = loads.get(int(self._ledger.states[page]))
            if event is not None and self._ledger.owners[page] == request.uid:
                self._ledger.pages.advance(event, page.reshape(1), self._session.step, request.request_id)

    def _pack(self, given: Given) -> PageSnapshot:
        self._exclude_all(given)
        return self._checks.pack(self._pages, self._session.step, given.get("group"))

    def _move(self, given: Given) -> None:
        """Nobody knows what lies where it went."""
        pages = self._inside((on_host(given["dst"]) // self._session.state.page_size).tolist())
        holders = [name for page in pages for name in self._ledger.holders(page)]
        self._report_contradiction(self._error, holders, pages)
        self._exclude(holders, pages)

    def _launch(self, given: Given) -> Any:
        """It runs all the same, with as many numbers as it has forwards and requests, and what it says is of no use."""
        launch_group, written, reads = given["launch_group"], list(given["written"]), list(given["reads"])
        forwards = {(substep.pool.name, substep.site) for substep in launch_group}
        if not forwards <= self._excluded.forwards:
            self._report_contradiction(self._error, self._requests, (), site=launch_group.substeps[0].site)
        self._excluded.forwards |= forwards
        self._exclude(self._requests)
        count = launch_group.num_known * len(self._requests)
        written, reads = ((own + [0] * most)[:most] for own, most in ((written, count), (reads, launch_group.count)))
        return self._hook(launch_group, self._requests, written, reads, given["where"])

    def _release(self, given: Given) -> Any:
        """It ends with all that was committed."""
        self._exclude_all(given)
        return self._hook(given["request_id"])

    def _act(self, given: Given) -> frozenset[str]:
        self._exclude_all(given)
        return self._reporting.act()

    def _end_step(self, given: Given) -> InFlight:
        self._exclude_all(given)
        flight = InFlight(self._session.step, None, [])
        flight.is_collected = True
        return flight

    def _collect(self, given: Given) -> frozenset[str]:
        self._exclude_all(given)
        return self._reporting.conclude()


#: By hook, how it is followed when it was refused.
FOLLOW: dict[str, Follow] = {
    "admit": Contradictions._admit,
    "commit_all": Contradictions._commit,
    "on_free": Contradictions._free,
    "on_share": Contradictions._share,
    "on_acquire": Contradictions._acquire,
    "on_fork": Contradictions._fork,
    "on_copy": Contradictions._copy,
    "on_evict": Contradictions._evict,
    "on_offload": Contradictions._pack,
    "on_swap_out": lambda self, given: self._pack(given).each(),
    "on_move": Contradictions._move,
    "launch_group": Contradictions._launch,
    "release": Contradictions._release,
    "end_step": Contradictions._end_step,
    "collect": Contradictions._collect,
    **dict.fromkeys(("on_alloc", "on_alloc_all"), Contradictions._grant),
    **dict.fromkeys(("on_load_begin", "on_load_end", "on_load_fail", "on_restore"), Contradictions._load),
    **dict.fromkeys(("sweep_cached", "judge_copies", "drain"), Contradictions._act),
    **dict.fromkeys(
        ("append_all", "on_deduplicate", "on_map", "on_unmap", "on_swap_in", "before_move"), Contradictions._exclude_all
    ),
}


def _named(given: Given) -> tuple[list[str], list[int]]:
    """The requests and pages that an event names, in its order."""
    requests = [given[name] for name in ("request_id", "child_id") if name in given]
    requests += given.get("request_ids", ())
    pages = [given[name] for name in ("page", "copy", "kept") if name in given]
    for own in given.get("pages", ()):
        pages += [own] if isinstance(own, (int, np.integer)) else own
    return requests, pages


def _sides(error: Exception) -> tuple[Given, Given]:
    name: Given = {"error": type(error).__name__}
    if isinstance(error, LifetimeError) and error.outside is not None:
        return {}, {"page": error.outside} | name
    if not isinstance(error, PageStateError):
        return {}, name
    legal = [STATE_NAMES[state] for state in EVENTS[error.event].after]
    return {"state": " or ".join(legal)}, {"state": error.state, "event": error.event} | name
