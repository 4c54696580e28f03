"""Stats: every so many steps one structlog event with the certificate's counters."""

from __future__ import annotations

import structlog

from kvcanary.calls.coverage import Coverage
from kvcanary.errors import CanaryConfigError

_events = structlog.get_logger("kvcanary")


class Stats:
    """Tells `kvcanary.stats` when `every` steps have passed since the last time.

    The event has `step`, `steps` since the last one, `totals` since the canary was attached, `deltas` since the last
    event, and the two levels that do not add up: `peak_live_bytes` and `max_unread_steps`.

    due: the step behind which it tells again
    """

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise CanaryConfigError(f"every must be at least 1 step, got {every}: leave Stats out to tell nothing")
        self._every = every
        self._step, self.due = 0, every
        self._reported: dict[str, int] = {}

    def tick(self, step: int, coverage: Coverage) -> bool:
        """Call once a step, after its checks, or in those that are due; whether an event was told."""
        if step < self.due:
            return False
        totals = coverage.totals()
        _events.info(
            "kvcanary.stats",
            step=step,
            steps=step - self._step,
            totals=totals,
            deltas={name: total - self._reported.get(name, 0) for name, total in totals.items()},
            peak_live_bytes=coverage.peak_live_bytes,
            max_unread_steps=coverage.max_unread_steps,
        )
        self._step, self.due, self._reported = step, step + self._every, totals
        return True
