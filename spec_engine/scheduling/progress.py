"""What an engine has done since a token left or a request ended: whether it goes on, or round and round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcanary.invariants import Pressure, Standstill, check_progress
from spec_engine.request import Request
from spec_engine.scheduling.scheduler import Scheduler


class Progress:
    """Counts steps without progress. Not forwards: these are many where requests retract each other for ever.

    still_steps: one after another in which no token left, no request ended, and nothing new was computed.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.still_steps = 0
        self._computes_anew = False  # in this step
        self._computed: dict[str, int] = {}  # by request, how far since a token left or a request ended
        self._retracted: Counter[str] = Counter()
        self._failed_loads: Counter[str] = Counter()
        self._kept: list[str] = []
        self._pressure: Pressure | None = None  # of the last retraction since

    def computed(self, request: Request, end: int) -> None:
        """Tokens of the request up to ``end`` are prefilled: new where it was not as far since something moved."""
        if end > self._computed.get(request.request_id, 0):
            self._computed[request.request_id] = end
            self._computes_anew = True

    def retracted(self, requests: Sequence[Request], kept: Sequence[Request], pressure: Pressure) -> None:
        """Requests gave up their pages for those that were kept; ``pressure``: why, before they did."""
        self._retracted.update(request.request_id for request in requests)
        self._kept = [request.request_id for request in kept]
        self._pressure = pressure

    def load_failed(self, request: Request) -> None:
        """What the request had computed did not come back from the host."""
        self._failed_loads[request.request_id] += 1

    def moved(self) -> None:
        """A token left, a request ended, or there is nothing to do: what was before does not count."""
        self.still_steps = 0
        self._computes_anew = False
        self._computed.clear()
        if self._retracted or self._failed_loads:
            self._retracted.clear()
            self._failed_loads.clear()
            self._pressure = None

    def end_step(self, has_moved: bool) -> None:
        """Behind every step. StalledError where too many have passed in which nothing moved."""
        if has_moved:
            self.moved()
            return
        self.still_steps = 0 if self._computes_anew else self.still_steps + 1
        self._computes_anew = False
        check_progress(self.still_steps, self._standstill)

    def _standstill(self) -> Standstill:
        scheduler = self._scheduler
        return Standstill(
            running=[request.request_id for request in scheduler.running],
            waiting=scheduler.expected_pages(scheduler.waiting),
            pressure=self._pressure or scheduler.pressure(),
            retracted=self._retracted,
            failed_loads=self._failed_loads,
            kept=self._kept,
        )
