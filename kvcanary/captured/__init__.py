"""Forwards that judge themselves on the device, in graphs or eager, and reading back what they found.

The names here are what an engine with graphs holds.
"""

from kvcanary.captured.accepted_tokens import Seats, StaticAcceptance, StaticTruth
from kvcanary.captured.in_flight import Flight
from kvcanary.captured.moves import StaticMove
from kvcanary.captured.substep import StaticSubstep

__all__ = ["Flight", "Seats", "StaticAcceptance", "StaticMove", "StaticSubstep", "StaticTruth"]
