"""EventLog: where events are recorded, one event at a time, whoever records it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Event = tuple[Any, ...]  # its name, then its arguments
LONG = 16  # sequences of so many integers and more are kept as arrays


class EventLog:
    """Passes events to whoever listens now.

    append: takes one event of plain arguments and short tuples of them, or of arrays of 64-bit integers that nobody
            changes any more; an attribute, for steps tell of themselves in every call and a method is one call more
    ints:   numbers in such arrays, since a listener has counted them
    """

    __slots__ = ("append", "ints")

    def __init__(self) -> None:
        self.ints = 0
        self.append: Callable[[Event], None] = nowhere()


def nowhere() -> Callable[[Event], None]:
    """Where events go that nobody wants."""
    return deque[Event](maxlen=0).append
