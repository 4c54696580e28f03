"""PageHistory: the last events of every page, each with step, request and the line that asked for it."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterable
from itertools import chain, repeat
from types import FrameType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HISTORY_EVENTS = 8  # kept a page, newest last
FEW = 16  # pages that are noted one by one
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_is_own: dict[str, bool] = {}  # files that have called, whether they are of this package
EventFields = tuple[str, int, tuple[str, int] | None]  # kind, step and site of an event
_TO_SOMEBODY = frozenset({"granted", "set aside", "copied"})
_WORDS = {"copied": "granted as a copy"}  # where the name of an event says more than has happened


class PageEvent(NamedTuple):
    """One event of a page.

    kind:       a key of `page_states.EVENTS`
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


class PageHistory:
    """By page its newest `HISTORY_EVENTS` events, oldest first."""

    def __init__(self, num_pages: int) -> None:
        # arrays of objects, and no lists: those would be looked through whenever garbage is searched for
        self._counts = array("q", bytes(8 * num_pages))  # of all that each page has had
        self._event_fields = np.full(num_pages * HISTORY_EVENTS, None, object)  # kind, step and site, counted around
        self._requests = np.full(num_pages * HISTORY_EVENTS, None, object)  # that took part

    def add(self, kind: str, pages: NDArray[np.int64], step: int, request_id: str | None) -> None:
        """One event of all these pages, [n] distinct, asked for by whoever called into this package."""
        if len(pages) < FEW:
            self.add_all(kind, pages, step, repeat(request_id), (len(pages),))
            return
        event, counts = np.empty((), object), np.frombuffer(self._counts, np.int64)
        event[()] = kind, step, call_site()
        places = HISTORY_EVENTS * pages + counts[pages] % HISTORY_EVENTS
        self._event_fields[places], self._requests[places] = event, request_id
        counts[pages] += 1

    def add_all(
        self, kind: str, pages: NDArray[np.int64], step: int, request_ids: Iterable[str | None], counts: Iterable[int]
    ) -> None:
        """One event for each of these requests, of so many of the pages, [n] distinct, in their order."""
        event: EventFields = kind, step, call_site()
        had, event_fields, requests = self._counts, self._event_fields, self._requests
        names = chain.from_iterable(map(repeat, request_ids, counts))
        for page, request_id in zip(pages.tolist(), names, strict=False):
            count = had[page]
            place = HISTORY_EVENTS * page + count % HISTORY_EVENTS
            event_fields[place], requests[place], had[page] = event, request_id, count + 1

    def of(self, page: int) -> tuple[PageEvent, ...]:
        if not 0 <= page < len(self._counts):
            return ()
        count, first = self._counts[page], HISTORY_EVENTS * page
        places = [first + number % HISTORY_EVENTS for number in range(max(count - HISTORY_EVENTS, 0), count)]
        event_fields, request_ids = self._event_fields[places].tolist(), self._requests[places].tolist()
        return tuple(
            PageEvent(kind, step, name, site)
            for (kind, step, site), name in zip(event_fields, request_ids, strict=True)
        )


def phrase(kind: str, request_id: str | None) -> str:
    """An event and its request in words."""
    word = _WORDS.get(kind, kind)
    return word if request_id is None else f"{word} {'to' if kind in _TO_SOMEBODY else 'by'} {request_id!r}"


def call_site() -> tuple[str, int] | None:
    """(file name, line) of the innermost caller outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_own = _is_own.get(file)
        if is_own is None:
            is_own = _is_own[file] = file.startswith(_PACKAGE)
        if not is_own:
            return file, frame.f_lineno
        frame = frame.f_back
    return None
