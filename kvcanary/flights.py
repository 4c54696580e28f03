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


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The end of all that the device was given so far."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record(current(device))
    return event
