"""Turns: who runs next where the device has no room for all running requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spec_engine.request import Request


class Turns:
    """Requests of one forward fit on a device of ``num_pages``; the next turn begins with whoever waited longest.

    num_steps: of a turn; a change of places is a copy of whole rows.
    """

    def __init__(self, num_pages: int, num_steps: int) -> None:
        self.num_pages = num_pages
        self._num_steps, self._left, self._now = num_steps, 0, 0
        self._members: set[Request] = set()

    def choose(self, requests: Sequence[Request], pages_of: Callable[[Request], int]) -> list[Request]:
        """Those that run now, in the order of ``requests``: whose turn it is, and others beside them where they fit.

        pages_of: how many a request needs on the device; one alone always fits.
        """
        stays = self._members if self._left else set[Request]()
        order = sorted(requests, key=lambda request: (request not in stays, request.ran_at))
        chosen, room = set[Request](), self.num_pages
        for request in order:
            if (needed := pages_of(request)) <= room:
                chosen.add(request)
                room -= needed
        return [request for request in requests if request in chosen]

    def ran(self, requests: Sequence[Request]) -> None:
        """These ran in a step."""
        if not self._left:
            self._members, self._left = set(), self._num_steps
        self._members |= set(requests)
        self._left, self._now = self._left - 1, self._now + 1
        for request in requests:
            request.ran_at = self._now
