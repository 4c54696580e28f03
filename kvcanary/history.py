"""History: the last events of every page, each with step, request and the line that asked for it."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

HISTORY_EVENTS = 8  # kept a page, newest last
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TO_SOMEBODY = frozenset({"granted", "set aside", "copied"})


class PageEvent(NamedTuple):
    """One event of a page.

    kind:       a key of `pages.EVENTS`
    request_id: None where no request takes part
    site:       (file name, line) of the caller outside this package; None where there is none
    """

    kind: str
    step: int
    request_id: str | None
    site: tuple[str, int] | None = None

    def __str__(self) -> str:
        """What happened, in words: `freed by 'a' at step 4`."""
        return f"{phrase(self.kind, self.request_id)} at step {self.step}"

    @property
    def place(self) -> str:
        """The call site as `file.py:88`."""
        return "unknown place" if self.site is None else f"{os.path.basename(self.site[0])}:{self.site[1]}"


class History:
    """By page its newest `HISTORY_EVENTS` events, oldest first."""

    def __init__(self) -> None:
        self._events: dict[int, deque[PageEvent]] = {}

    def add(self, kind: str, pages: Iterable[int], step: int, request_id: str | None) -> None:
        """One event of all these pages, asked for by whoever called into this package."""
        event, events = PageEvent(kind, step, request_id, call_site()), self._events
        for page in pages:
            kept = events.get(page)
            if kept is None:
                kept = events[page] = deque(maxlen=HISTORY_EVENTS)
            kept.append(event)

    def of(self, page: int) -> tuple[PageEvent, ...]:
        return tuple(self._events.get(page, ()))


def phrase(kind: str, request_id: str | None) -> str:
    """An event and its request in words."""
    if request_id is None:
        return kind
    return f"{kind} {'to' if kind in _TO_SOMEBODY else 'by'} {request_id!r}"


def call_site() -> tuple[str, int] | None:
    """(file name, line) of the innermost caller outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
