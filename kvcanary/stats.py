"""Stats: every so many steps one structlog event with the certificate's counters."""

from __future__ import annotations

import structlog

from kvcanary.certificate import Coverage
from kvcanary.errors import CanaryConfigError

_events = structlog.get_logger("kvcanary")


class Stats:
    """Tells `kvcanary.stats` when `every` steps have passed since the last time.

    The event has `step`, `steps` since the last one, `totals` since the canary was attached, `deltas` since the last
    event, and the two levels that do not add up: `peak_live_bytes` and `max_unread_steps`.
    """

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise CanaryConfigError(f"every must be at least 1 step, got {every}: leave Stats out to tell nothing")
        self._every = every
        self._step = 0
        self._told: dict[str, int] = {}

    def is_due(self, step: int) -> bool:
        return step >= self._step + self._every

    def tick(self, step: int, coverage: Coverage) -> bool:
        """Call once a step, after its checks; whether an event was told."""
        if not self.is_due(step):
            return False
        totals = coverage.totals()
        _events.info(
            "kvcanary.stats",
            step=step,
            steps=step - self._step,
            totals=totals,
            deltas={name: total - self._told.get(name, 0) for name, total in totals.items()},
            peak_live_bytes=coverage.peak_live_bytes,
            max_unread_steps=coverage.max_unread_steps,
        )
        self._step, self._told = step, totals
        return True
