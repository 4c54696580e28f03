"""Flights: what one step's captured forwards and re-reads say, on its way to a host that does not wait for it."""

from __future__ import annotations

import torch

from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.captured.step import SentStep
from kvcanary.scrub.rereads import StepRereads
from kvcanary_kernels.record.streams import current


class InFlight:
    """One step on its way.

    step:  its number;  sent: of its forwards;  rereads: at bytes
    turn:  in which the first of its forwards was launched, or it was sent where it has none
    over:  the end of all of it on a GPU; None: its host says that it has waited for it (`Marks.wait`)
    violations:  what fired and was known when it was launched; all that fired, when the flight was collected
    is_over: nobody needs to wait any more
    """

    rereads: StepRereads | None = None
    over: torch.cuda.Event | None = None
    is_over = is_collected = False

    def __init__(
        self, step: int, sent: SentStep | None, violations: list[Violation | ViolationBatch], turn: int = 0
    ) -> None:
        """`turn`: of now"""
        self.step, self.sent, self.violations = step, sent, violations
        self.turn = turn if sent is None or not sent.launches else sent.launches[0].turn  # they are in their order


class Marks:
    """Ends of flights on a device: events that are recorded again once nobody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._free = device, list[torch.cuda.Event]()

    def take(self) -> torch.cuda.Event | None:
        """The end of all that the device was given so far; None on a CPU."""
        if self._device.type == "cpu":
            return None
        event = self._free.pop() if self._free else torch.cuda.Event()
        event.record(current(self._device))
        return event

    def wait(self, flight: InFlight) -> None:
        """The host stands still until a flight is over, where it did not say that it is; then it is over."""
        if flight.over is None and not flight.is_over:  # it was asked for before the host had waited
            flight.over = self.take()
        if flight.over is not None:
            flight.over.synchronize()
            self._free.append(flight.over)
        flight.over, flight.is_over = None, True
