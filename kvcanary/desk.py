"""TicketDesk: asynchronous work that touches pages or host buffers, issued, waited for and judged (O1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcanary.hits import Hit
from kvcanary.ledger import Ledger
from kvcanary.state import PoolState
from kvcanary.tickets import HOST, Resource, Stream, Ticket, Tickets, Touched, Violation

Note = Callable[[str, Sequence[Any]], None]


class TicketDesk:
    """What an engine tells of its copies, zeroings, offloads and staging buffers; every violation is a hit.

    note: is told of every call, by name and arguments
    """

    def __init__(self, ledger: Ledger, pool: PoolState, report: Callable[[Sequence[Hit]], None]) -> None:
        self._ledger, self._pool, self._report = ledger, pool, report
        self._tickets = Tickets(ledger.generations)
        self.is_used = False
        self.step = 0
        self.note: Note = _nobody

    def issue(
        self, what: str, stream: Stream, reads: Sequence[Resource] = (), writes: Sequence[Resource] = ()
    ) -> Ticket:
        """Work is enqueued on a stream. Pages by number, under the grants that they have now; buffers by name."""
        self.is_used = True
        ticket = self._tickets.issue(what, stream, self._granted(reads), self._granted(writes))
        self.note("ticket_issue", (what, str(stream), ticket.sequence, *_sorted(reads), *_sorted(writes)))
        self._tell(ticket.violations)
        return ticket

    def waits(self, stream: Stream, ticket: Ticket) -> None:
        """What comes on this stream from now on runs behind the ticket's work."""
        self.note("ticket_waits", (str(stream), str(ticket.stream), ticket.sequence))
        self._tickets.waits(stream, ticket)

    def complete(self, ticket: Ticket) -> None:
        """The host has seen the work's event."""
        self.note("ticket_complete", (str(ticket.stream), ticket.sequence))
        self._tell(self._tickets.complete(ticket))

    def use(self, what: str, stream: Stream, resources: Sequence[Resource], writes: bool = False) -> None:
        """An access on a stream that leaves nothing in flight: a forward over pages, the host over a buffer."""
        if self.is_used:
            self.note("ticket_use", (what, str(stream), *_sorted(resources), writes))
            self._tell(self._tickets.use(what, stream, self._granted(resources), writes))

    def freed(self, pages: Sequence[int]) -> None:
        """Pages are given back: nothing may be in flight there."""
        if self.is_used:
            self._tell(self._tickets.free(self._granted(pages), HOST))

    def _granted(self, resources: Sequence[Resource]) -> Touched:
        generations = self._ledger.generations
        self._ledger.pages.numbers([r for r in resources if isinstance(r, int)])
        return {r: None if isinstance(r, str) else int(generations[r]) for r in resources}

    def _tell(self, violations: Sequence[Violation]) -> None:
        self._report([self._hit(violation) for violation in violations])

    def _hit(self, violation: Violation) -> Hit:
        page = violation.resource if isinstance(violation.resource, int) else None
        slot = -1 if page is None else page * self._pool.view.page_size
        owner = None if page is None else self._ledger.owner_of(page)
        waited = "nothing" if violation.ticket is None else str(violation.ticket)
        return Hit(
            "O1",
            self._pool,
            slot,
            None,
            owner,
            ("stream", 0),
            self.step,
            expected={"behind": waited},
            found={"access": violation.sentence},
        )


def _sorted(resources: Sequence[Resource]) -> tuple[list[int], tuple[str, ...]]:
    """Pages, and the names of buffers."""
    pages = [resource for resource in resources if not isinstance(resource, str)]
    return pages, tuple(resource for resource in resources if isinstance(resource, str))


def _nobody(name: str, args: Sequence[Any]) -> None:
    """Who is told where nobody asked to be."""
