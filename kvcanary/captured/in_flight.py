"""Flights: what one step's captured forwards and looks say, on its way to a host that does not wait for it."""

from __future__ import annotations

import torch

from kvcanary.calls.violation import Hit
from kvcanary.calls.violation_log import HitBatch
from kvcanary.captured.step import Told
from kvcanary.scrub.rereads import Line
from kvcanary_kernels.record.streams import current


class InFlight:
    """One step on its way.

    step:  its number;  told: of its forwards;  looks: at bytes
    turn:  in which the first of its forwards was launched, or it departed where it has none
    over:  the end of all of it on a GPU; None: its host says that it has waited for it (`Marks.wait`)
    hits:  what fired and was known at departure; all that fired, when the flight has landed
    is_over: nobody needs to wait any more
    """

    looks: Line | None = None
    over: torch.cuda.Event | None = None
    is_over = has_landed = False

    def __init__(self, step: int, told: Told | None, hits: list[Hit | HitBatch], turn: int = 0) -> None:
        """`turn`: of now"""
        self.step, self.told, self.hits = step, told, hits
        self.turn = turn if told is None or not told.launches else told.launches[0].turn  # they are in their order


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
