"""Forwards that judge themselves on the device, in graphs or eager, and reading back what they found.

The names here are what an engine with graphs holds.
"""

from kvcanary.captured.accepted_tokens import AcceptedTokens, CapturedAcceptance, CapturedTruth
from kvcanary.captured.in_flight import InFlight
from kvcanary.captured.moves import CapturedMove
from kvcanary.captured.states import CapturedStates
from kvcanary.captured.substep import CapturedSubstep

__all__ = [
    "AcceptedTokens",
    "CapturedAcceptance",
    "CapturedMove",
    "CapturedStates",
    "CapturedSubstep",
    "CapturedTruth",
    "InFlight",
]
