"""Who stands still where requests run and none of them would ever end, and what each needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MOST_NAMES = 8  # in a message


@dataclass(frozen=True)
class Pressure:
    """Pages of one forward: what was asked for, what could be had, and how much of that waits in quarantine.

    needs: of each of its requests, beyond the pages that it owns; what was asked for is an estimate of their sum.
    """

    asked: int
    available: int
    quarantined: int
    needs: Mapping[str, int]

    def __str__(self) -> str:
        each = _listed(f"{name} {count}" for name, count in self.needs.items())
        return (
            f"{self.asked} pages asked for the next forward, {self.available} could be had, {self.quarantined} in "
            f"quarantine; its requests need {sum(self.needs.values())} beyond their own ({each})"
        )


@dataclass(frozen=True)
class Standstill:
    """Who stands still, and what each does about it.

    running, waiting: requests; of those that wait, the pages that each is to find before it is admitted.
    retracted, failed_loads: how often a request gave up its pages since something moved, for want of pages or because
        what was to come back from the host did not.
    kept: for whom, the last time; pressure: of that time, or of now.
    """

    running: Sequence[str]
    waiting: Mapping[str, int]
    pressure: Pressure
    retracted: Mapping[str, int] = field(default_factory=dict)
    failed_loads: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[str] = ()

    def __str__(self) -> str:
        waiting = _listed(f"{name} {count}" for name, count in self.waiting.items())
        parts = [f"running: {_listed(self.running)}; waiting for pages: {waiting}"]
        if self.retracted:
            given_up = _listed(f"{name} {count} times" for name, count in self.retracted.items())
            parts.append(f"gave up their pages: {given_up}, last for {_listed(self.kept)}")
        if self.failed_loads:
            failed = _listed(f"{name} {count} times" for name, count in self.failed_loads.items())
            parts.append(f"sent back by a load from the host that failed: {failed}")
        return "; ".join([*parts, str(self.pressure)])

    @property
    def remedy(self) -> str:
        if self.failed_loads:
            return "look for what fails on the host, or do without host_pages"
        if sum(self.pressure.needs.values()) <= self.pressure.available:
            return "what they need is there, so that no setting helps: the estimate, or who admits by it, is wrong"
        return "raise max_total_tokens or new_token_ratio, or lower max_running_requests"


def _listed(names: Iterable[str]) -> str:
    some = list(names)
    more = [f"{len(some) - MOST_NAMES} more"] if len(some) > MOST_NAMES else []
    return ", ".join(some[:MOST_NAMES] + more) or "nobody"
