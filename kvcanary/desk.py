"""TicketDesk: asynchronous work that touches pages or host buffers, issued, waited for and judged (O1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcanary.hits import Hit
from kvcanary.ledger import Ledger
from kvcanary.recorder import LONG
from kvcanary.state import PoolState
from kvcanary.tickets import HOST, Resource, Stream, Ticket, Tickets, Touched, Violation

#: What an access touches: pages and buffers as they are now, or each with the generation that it was planned for.
Resources = Sequence[Resource] | Touched
Note = Callable[[str, Sequence[Any]], None]
_NOTHING: Touched = {}


class TicketDesk:
    """What an engine tells of its copies, zeroings, offloads and staging buffers; every violation is a hit.

    note: is told of every call, by name and arguments;  told: the same, where nobody can change these any more
    """

    def __init__(self, ledger: Ledger, pool: PoolState, report: Callable[[Sequence[Hit]], None]) -> None:
        self._ledger, self._pool, self._report = ledger, pool, report
        self._tickets = Tickets(ledger.generations)
        self.is_used = self.has_told = False  # told: a violation since somebody has judged it
        self.step = 0
        self.note: Note = _nobody
        self.told: Callable[[str, tuple[Any, ...]], None] = _nobody

    def issue(self, what: str, stream: Stream, reads: Resources = (), writes: Resources = ()) -> Ticket:
        """Work is enqueued on a stream. Pages by number, under the grants that they have now; buffers by name.

        A mapping says for which generation of each it was planned.
        """
        self.is_used = True
        ticket = self._tickets.issue(what, stream, self._granted(reads), self._granted(writes))
        told = self.told if len(reads) + len(writes) < LONG else self.note
        told("ticket_issue", (what, str(stream), ticket.sequence, *_sorted(reads), *_sorted(writes)))
        if ticket.violations:
            self._tell(ticket.violations)
        return ticket

    def waits(self, stream: Stream, ticket: Ticket) -> None:
        """What comes on this stream from now on runs behind the ticket's work."""
        self.told("ticket_waits", (str(stream), str(ticket.stream), ticket.sequence))
        self._tickets.waits(stream, ticket)

    def complete(self, ticket: Ticket) -> None:
        """The host has seen the work's event."""
        self.told("ticket_complete", (str(ticket.stream), ticket.sequence))
        if violations := self._tickets.complete(ticket):
            self._tell(violations)

    def use(
        self, what: str, stream: Stream, resources: Resources, writes: bool = False, requests: Sequence[str] = ()
    ) -> None:
        """An access on a stream that leaves nothing in flight: a forward over pages, the host over a buffer.

        requests: whose tokens a violation touches, where that is not the owner of a page.
        """
        if self.is_used:
            told = self.told if len(resources) < LONG else self.note
            told("ticket_use", (what, str(stream), *_sorted(resources), writes, tuple(requests)))
            if violations := self._tickets.use(what, stream, self._granted(resources), writes):
                self._tell(violations, requests)

    def renew(self, buffer: str, generation: int) -> None:
        """A host buffer is taken for something else, and counts its generation up."""
        self.told("ticket_renew", (buffer, generation))
        self._tickets.renew(buffer, generation)

    @property
    def buffers(self) -> dict[str, int]:
        """Host buffers that have a generation, and the one that they are in."""
        return self._tickets.buffers

    def freed(self, pages: Sequence[int]) -> None:
        """Pages are given back: nothing may be in flight there."""
        if self.is_used and (violations := self._tickets.free(self._granted(pages), HOST)):
            self._tell(violations)

    def _granted(self, resources: Resources) -> Touched:
        if not resources:
            return _NOTHING
        if isinstance(resources, Mapping):
            return resources
        generations = self._ledger.generations
        self._ledger.pages.numbers([r for r in resources if isinstance(r, int)])
        return {r: None if isinstance(r, str) else int(generations[r]) for r in resources}

    def _tell(self, violations: Sequence[Violation], requests: Sequence[str] = ()) -> None:
        self.has_told = True
        self._report([self._hit(violation, requests) for violation in violations])

    def _hit(self, violation: Violation, requests: Sequence[str]) -> Hit:
        page = violation.resource if isinstance(violation.resource, int) else None
        slot = -1 if page is None else page * self._pool.view.page_size
        owners = requests if page is None else _names(self._ledger.owner_of(page))
        waited = "nothing" if violation.ticket is None else str(violation.ticket)
        return Hit(
            "O1",
            self._pool,
            slot,
            None,
            owners[0] if owners else None,
            ("stream", 0),
            self.step,
            others=tuple(owners[1:]),
            expected={"behind": waited},
            found={"access": violation.sentence, "hazard": violation.hazard},
        )


def _names(owner: str | None) -> Sequence[str]:
    return () if owner is None else (owner,)


def _sorted(resources: Resources) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...] | None]:
    """Pages, names of buffers, and of both, where it was said, the generations that were meant; -1: any."""
    if not resources:
        return (), (), None
    pages = tuple([int(resource) for resource in resources if not isinstance(resource, str)])
    names = tuple([resource for resource in resources if isinstance(resource, str)])
    if not isinstance(resources, Mapping):
        return pages, names, None
    order: list[Resource] = [*pages, *names]
    planned = [resources[resource] for resource in order]
    return pages, names, tuple([-1 if generation is None else int(generation) for generation in planned])


def _nobody(name: str, args: Sequence[Any]) -> None:
    """Who is told where nobody asked to be."""
