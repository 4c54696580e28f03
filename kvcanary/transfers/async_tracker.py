"""AsyncTracker: asynchronous work that touches pages or host buffers, issued, waited for and judged (O1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.ledger.ledger import Ledger
from kvcanary.pools.event_log import LONG, Event, EventLog
from kvcanary.pools.slot_maps import slots_in
from kvcanary.records.state import PoolState
from kvcanary.transfers.async_ops import HOST, NOTHING, AsyncOp, AsyncOps, Resource, Stream, Touched, UnorderedAccess

#: What an access touches: pages and buffers as they are now, or each with the generation that it was planned for.
Resources = Sequence[Resource] | Touched
FILL = "fill"  # what the host does with a buffer that it takes
#: The same where nobody can change it any more.
Named = tuple[Resource, ...] | dict[Resource, int | None]


class AsyncTracker:
    """What an engine declares of its copies, zeroings, offloads and staging buffers; each unordered access is a
    violation.

    note: is told of every call, its name and then its arguments
    log:  the same, where nobody can change these any more; LAID_OUT of what has another name there
    """

    def __init__(self, ledger: Ledger, pool: PoolState, report: Callable[[Sequence[Violation]], None]) -> None:
        self._ledger, self._pool, self._report = ledger, pool, report
        self._async_ops = AsyncOps(ledger.generations)
        self.is_used = self.has_reported = False  # told: a violation since somebody has judged it
        self.step = 0
        self.note: Callable[..., None] = lambda *event: None
        self.log = EventLog()

    def issue(self, what: str, stream: Stream, reads: Resources = (), writes: Resources = ()) -> AsyncOp:
        """Work is enqueued on a stream. Pages by number, under the grants that they have now; buffers by name.

        A mapping says for which generation of each it was planned.
        """
        self.is_used = True
        read, written = _named(reads) if reads else (), _named(writes) if writes else ()
        op = self._async_ops.issue(what, stream, self._granted(read), self._granted(written))
        if len(read) + len(written) < LONG:
            self.log.append(("issued", what, stream, op.sequence, read, written))
        else:
            for event in issued(what, stream, op.sequence, read, written):
                self.note(*event)
        if op.unordered_accesses:
            self._report_unordered(op.unordered_accesses)
        return op

    def waits(self, stream: Stream, op: AsyncOp) -> None:
        """What comes on this stream from now on runs behind the operation's work."""
        self.log.append(("ticket_waits", str(stream), str(op.stream), op.sequence))
        self._async_ops.waits(stream, op)

    def follow(self, stream: Stream, other: Stream) -> None:
        """What comes on this stream from now on runs behind all of the other's: `waits`, for a mark issued there."""
        self.is_used = True
        self.log.append(("followed", stream, other, self._async_ops.follow(stream, other)))

    def complete(self, op: AsyncOp) -> None:
        """The host has seen the work's event."""
        self.log.append(("ticket_complete", str(op.stream), op.sequence))
        if unordered_accesses := self._async_ops.complete(op):
            self._report_unordered(unordered_accesses)

    def use(
        self, what: str, stream: Stream, resources: Resources, writes: bool = False, requests: Sequence[str] = ()
    ) -> None:
        """An access on a stream that leaves nothing in flight: a forward over pages, the host over a buffer.

        requests: whose tokens a violation touches, where that is not the owner of a page.
        """
        if self.is_used:
            named = _named(resources) if resources else ()
            if len(named) < LONG:
                self.log.append(("used", what, stream, named, writes, tuple(requests)))
            else:
                for event in used(what, stream, named, writes, tuple(requests)):
                    self.note(*event)
            if unordered_accesses := self._async_ops.use(what, stream, self._granted(named), writes):
                self._report_unordered(unordered_accesses, requests)

    def renew(self, buffer: str, generation: int) -> None:
        """A host buffer is taken for something else, and counts its generation up."""
        self.log.append(("ticket_renew", buffer, generation))
        self._async_ops.renew(buffer, generation)

    def take(self, what: str, stream: Stream, buffer: str, generation: int) -> None:
        """`renew` it, and `use` it for a write on a stream, in one call."""
        self.log.append(("took", what, stream, buffer, generation))
        self._async_ops.renew(buffer, generation)
        if self.is_used and (
            unordered_accesses := self._async_ops.use(what, stream, {buffer: generation}, writes=True)
        ):
            self._report_unordered(unordered_accesses)

    def fetch(self, what: str, stream: Stream, behind: Stream, buffer: str, generation: int) -> AsyncOp:
        """A host buffer is taken, for a copy on a stream, behind all that another was given so far, which writes it.

        `take` by the host, `follow` and `issue` in one call.
        """
        self.is_used = True
        fetch = self._async_ops.fetch(what, stream, behind, buffer, generation)
        if fetch is None:  # something is in flight there, and may have been waited for by nobody
            self.take(FILL, HOST, buffer, generation)
            self.follow(stream, behind)
            return self.issue(what, stream, writes={buffer: generation})
        op, mark = fetch
        self.log.append(("fetched", what, stream, behind, buffer, generation, mark, op.sequence))
        return op

    def receive(self, op: AsyncOp, what: str, requests: Sequence[str] = ()) -> None:
        """The host has seen the work's event, and reads what it has written: `complete`, and `use` by the host."""
        self.log.append(("received", what, op, tuple(requests)))
        if self._async_ops.receive(op):
            return
        if unordered_accesses := self._async_ops.complete(op):
            self._report_unordered(unordered_accesses)
        if unordered_accesses := self._async_ops.use(what, HOST, op.writes):
            self._report_unordered(unordered_accesses, requests)

    @property
    def buffers(self) -> dict[str, int]:
        """Host buffers that have a generation, and the one that they are in."""
        return self._async_ops.buffers

    def freed(self, pages: Sequence[int]) -> None:
        """Pages are given back: nothing may be in flight there."""
        if self.is_used and (unordered_accesses := self._async_ops.free(self._granted(tuple(pages)), HOST)):
            self._report_unordered(unordered_accesses)

    def _granted(self, named: Named) -> Touched:
        if not named:
            return NOTHING
        if isinstance(named, dict):
            return named
        pages = [resource for resource in named if isinstance(resource, int)]
        if not pages:
            return dict.fromkeys(named)
        self._ledger.pages.numbers(pages)
        generations = self._ledger.generations
        return {r: None if isinstance(r, str) else int(generations[r]) for r in named}

    def _report_unordered(self, unordered_accesses: Sequence[UnorderedAccess], requests: Sequence[str] = ()) -> None:
        self.has_reported = True
        self._report([self._violation(unordered, requests) for unordered in unordered_accesses])

    def _violation(self, unordered: UnorderedAccess, requests: Sequence[str]) -> Violation:
        page = unordered.resource if isinstance(unordered.resource, int) else None
        slot, name = (NO_SLOT, None) if page is None else self._slot(page)
        owner = None if page is None else self._ledger.owner_of(page)
        owners = requests if owner is None else (owner,)
        first, others = owners[0] if owners else None, tuple(owners[1:])
        own = "O1", self._pool, slot, None, first, ("stream", 0), self.step
        return Violation(*own, named=name, others=others, expected=unordered.expected, found=unordered.found)

    def _slot(self, page: int) -> tuple[int, int | None]:
        """The page's first slot in the pool, and how plans call it where that is another number."""
        view = self._pool.view
        name = page * view.page_size
        return (name, None) if view.slot_map is None else (int(slots_in(view, np.array([name]))[0]), name)


# calls as a dump has them, by the name under which the tracker tells of them


def issued(what: str, stream: Stream, sequence: int, reads: Named, writes: Named) -> list[Event]:
    return [("ticket_issue", what, str(stream), sequence, *_sorted(reads), *_sorted(writes))]


def used(what: str, stream: Stream, resources: Named, writes: bool, requests: tuple[str, ...]) -> list[Event]:
    return [("ticket_use", what, str(stream), *_sorted(resources), writes, requests)]


def took(what: str, stream: Stream, buffer: str, generation: int) -> list[Event]:
    return [("ticket_renew", buffer, generation), *used(what, stream, {buffer: generation}, True, ())]


def followed(stream: Stream, other: Stream, sequence: int) -> list[Event]:
    return [*issued("mark", other, sequence, (), ()), ("ticket_waits", str(stream), str(other), sequence)]


def fetched(
    what: str, stream: Stream, behind: Stream, buffer: str, generation: int, mark: int, sequence: int
) -> list[Event]:
    taken = took(FILL, HOST, buffer, generation)
    return [*taken, *followed(stream, behind, mark), *issued(what, stream, sequence, (), {buffer: generation})]


def received(what: str, op: AsyncOp, requests: tuple[str, ...]) -> list[Event]:
    used_by_host = used(what, HOST, dict(op.writes), False, requests)
    return [("ticket_complete", str(op.stream), op.sequence), *used_by_host]


LAID_OUT: dict[str, Callable[..., list[Event]]] = {
    layout.__name__: layout for layout in (issued, used, took, followed, fetched, received)
}


def _named(resources: Resources) -> Named:
    return dict(resources) if isinstance(resources, (dict, Mapping)) else tuple(resources)


def _sorted(resources: Named) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...] | None]:
    """Pages, names of buffers, and of both, where it was said, the generations that were meant; -1: any."""
    if not resources:
        return (), (), None
    pages = tuple([int(resource) for resource in resources if not isinstance(resource, str)])
    names = tuple([resource for resource in resources if isinstance(resource, str)])
    if not isinstance(resources, dict):
        return pages, names, None
    order: list[Resource] = [*pages, *names]
    planned = [resources[resource] for resource in order]
    return pages, names, tuple([-1 if generation is None else int(generation) for generation in planned])
