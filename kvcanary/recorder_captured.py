"""CapturedEvents: launches and moves of captured steps in a recording, filled in when the host hears of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcanary.recorder_forwards import Ints, RecordedLaunch, RecordedMove
from kvcanary_kernels.record import MASK_32

if TYPE_CHECKING:
    from kvcanary.harvest import StaticHit
    from kvcanary.learning import Heard, Learned
    from kvcanary.recorder import Segment
    from kvcanary.static import StaticSubstep

MOVE_SITE = ("move", 0)
KEPT_STEPS = 8  # behind which nobody hears any more of what was launched
Key = tuple[str, tuple[str, int], int]  # pool, site, low half of the step


class Launch(NamedTuple):
    """A launch and where its event lies."""

    recorded: RecordedLaunch
    segment: Segment
    number: int


class CapturedEvents:
    """What a recorder has of captured steps; a `graphs.Listener`."""

    def __init__(self) -> None:
        self._launches: dict[Key, list[Launch]] = {}
        self._moves: deque[tuple[RecordedMove, Segment]] = deque()
        self._move_events: dict[tuple[str, int], tuple[Segment, int]] = {}  # by pool and low half of the step
        self._departures: dict[int, tuple[Segment, int]] = {}
        self._landing: int | None = None

    def launched(
        self,
        substep: StaticSubstep,
        requests: Sequence[str],
        written: Sequence[int] | None,
        reads: int,
        step: int,
        segment: Segment,
    ) -> None:
        """A forward runs next; `requests`, `written`, `reads` as `CanaryManager.launch` has them, None: as accepted."""
        recorded = RecordedLaunch(substep.number, requests, written, reads)
        key = substep.pool.name, substep.site, step & MASK_32
        self._launches.setdefault(key, []).append(Launch(recorded, segment, len(segment.events)))
        segment.events.append(("launch", (recorded,), None))

    def launched_move(self, number: int, pool: str, step: int, segment: Segment) -> None:
        """A move runs next. `number`: of those in the bank."""
        recorded = RecordedMove(number)
        self._moves.append((recorded, segment))
        self._move_events[pool, step & MASK_32] = segment, len(segment.events)
        segment.events.append(("captured_move", (recorded,), None))

    def forget(self, step: int) -> None:
        """What nobody will ask for any more; once a step."""
        while self._launches and step - (oldest := next(iter(self._launches)))[2] >= KEPT_STEPS:
            del self._launches[oldest]
        while self._move_events and step - (last := next(iter(self._move_events)))[1] >= KEPT_STEPS:
            del self._move_events[last]
        self._departures.pop(step - KEPT_STEPS, None)

    def departed(self, step: int, segment: Segment) -> None:
        """All that the step has launched is on its way to the host."""
        self._departures[step] = segment, len(segment.events)
        segment.events.append(("depart", (step,), None))

    def landing(self, step: int | None) -> None:
        """What fires now was found by this step; None: by the one that runs."""
        self._landing = step

    def event_of(self, pool: str, site: tuple[str, int], step: int) -> tuple[Segment, int] | None:
        """Where the event lies in which a check has fired that fires now: the launch of its forward or move, or its
        departure.

        None: it is the last one.
        """
        launches = self._launches.get((pool, site, step & MASK_32))
        if launches is not None:
            return launches[-1].segment, launches[-1].number
        if site == MOVE_SITE and (pool, step & MASK_32) in self._move_events:
            return self._move_events[pool, step & MASK_32]
        return None if self._landing is None else self._departures.get(self._landing)

    # what the host hears

    def learned(self, forward: Learned, layers: Sequence[int]) -> None:
        launch = self._first_unheard(forward.pool.name, forward.site, forward.step)
        if launch is not None:
            launch.recorded.learn(forward, layers)
            launch.segment.array_bytes += launch.recorded.num_bytes

    def heard(self, forward: Heard, layers: Sequence[int]) -> None:
        substep = forward.substep
        launch = self._first_unheard(substep.pool.name, substep.site, forward.step)
        if launch is not None:
            launch.recorded.hear(forward, layers)
            launch.segment.array_bytes += launch.recorded.num_bytes

    def _first_unheard(self, pool: str, site: tuple[str, int], step: int) -> Launch | None:
        for launch in self._launches.get((pool, site, step & MASK_32), ()):
            if not launch.recorded.is_heard:
                return launch
        return None

    def moved(self, src: Ints, dst: Ints) -> None:
        if self._moves:
            recorded, segment = self._moves.popleft()
            recorded.src, recorded.dst = src, dst
            segment.array_bytes += src.nbytes + dst.nbytes

    def noticed(self, hit: StaticHit) -> None:
        for launch in self._launches.get((hit.pool, hit.site, hit.step), ())[-1:] if hit.is_exact else ():
            if hit.code == "W9":
                launch.recorded.padding.append((hit.row, hit.entry, hit.slot))
            elif hit.row >= 0 and hit.place >= 0:
                launch.recorded.strays.append((hit.row, hit.place, hit.slot))
