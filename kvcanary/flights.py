"""Flights: what one step's captured forwards and looks say, on its way to a host that does not wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvcanary.graphs import Told
from kvcanary.hits import Hit
from kvcanary.intake import HitBatch
from kvcanary.looks import Sent
from kvcanary_kernels.streams import current


@dataclass(eq=False)
class Flight:
    """One step behind `over`, the end of its copies on a GPU.

    step: its number
    hits: what fired and was known at departure; all that fired, when the flight has landed
    """

    step: int
    told: Told | None
    looks: Sent | None
    over: torch.cuda.Event | None
    hits: list[Hit | HitBatch] = field(default_factory=list)
    has_landed: bool = False

    def has_run_since(self, turn: int) -> bool:
        """Whether all of its forwards were launched in this turn or later."""
        forwards = () if self.told is None else self.told.forwards  # in the order of their launches
        return not forwards or forwards[0].turn >= turn

    def wait(self) -> None:
        """The host stands still until the copies are over."""
        if self.over is not None:
            self.over.synchronize()


class Marks:
    """Ends of flights on a device: events that are recorded again once nobody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._free = device, list[torch.cuda.Event]()

    def take(self) -> torch.cuda.Event | None:
        """The end of all that the device was given so far."""
        if self._device.type == "cpu":
            return None
        event = self._free.pop() if self._free else torch.cuda.Event()
        event.record(current(self._device))
        return event

    def give(self, event: torch.cuda.Event | None) -> None:
        """Its flight has landed."""
        if event is not None:
            self._free.append(event)
