"""CapturedEvents: launches and moves of captured steps in a recording, filled in when the host hears of them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from kvcanary.learning import Heard
from kvcanary.recorder_forwards import MOST_UNPACKED, Ints, RecordedLaunch, RecordedMove, RecordedSeries
from kvcanary_kernels.record import MASK_32

if TYPE_CHECKING:
    from kvcanary.harvest import StaticHit
    from kvcanary.learning import Launch, Launched, Learned
    from kvcanary.recorder import Segment
    from kvcanary.series import Series

_LAYERS = attrgetter("layers")
MOVE_SITE = ("move", 0)
MOST_KEPT = 8 * MOST_UNPACKED  # numbers of forwards that were heard of together: eight an entry
KEPT_STEPS = 8  # behind which nobody hears any more of what was launched
Site = tuple[str, int]
Place = tuple["Segment", int]


class StepEvents:
    """What one step has launched.

    step:      the low half of its number
    launches:  in their order
    moves:     by pool, where the event of the last one lies
    departure: where the event lies; None: it has not departed
    """

    __slots__ = ("departure", "launches", "moves", "step")

    def __init__(self, step: int) -> None:
        self.step = step & MASK_32
        self.launches: list[RecordedSeries] = []
        self.moves: dict[str, Place] = {}
        self.departure: Place | None = None

    def last_launch(self, pool: str, site: Site) -> RecordedLaunch | None:
        for launched in reversed(self.launches):
            for number, substep in reversed([*enumerate(launched.series.substeps)]):
                if substep.site == site and substep.pool.name == pool:
                    return launched[number]
        return None


class CapturedEvents:
    """What a recorder has of captured steps; a `graphs.Listener`.

    segment: to which events are added; None: nobody records
    """

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self._steps: deque[StepEvents] = deque(maxlen=KEPT_STEPS)
        self._moves: deque[tuple[RecordedMove, Segment]] = deque()
        self._landing: int | None = None
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """What comes belongs to this step; what nobody will ask for any more is forgotten."""
        self._now = StepEvents(step)
        self._steps.append(self._now)

    def launched(
        self,
        series: Series,
        requests: tuple[str, ...],
        written: Sequence[int],
        reads: Sequence[int],
    ) -> RecordedSeries | None:
        """Forwards run next; the rest as `CanaryManager.launch_all` has it, none written: as many as are accepted.

        What is returned comes back with what the host hears of them (`Launch`).
        """
        segment = self.segment
        if segment is None:
            return None
        launched = RecordedSeries(series, requests, written, reads, segment)
        for number in range(len(series.substeps)):
            segment.events.append(("launch", launched, number))
        self._now.launches.append(launched)
        return launched

    def launched_move(self, number: int, pool: str) -> None:
        """A move runs next. `number`: of those in the bank."""
        segment, recorded = self.segment, RecordedMove(number)
        if segment is None:
            return
        self._moves.append((recorded, segment))
        self._now.moves[pool] = segment, len(segment.events)
        segment.events.append(("captured_move", recorded))

    def departed(self, step: int) -> None:
        """All that the step has launched is on its way to the host."""
        segment = self.segment
        if segment is not None:
            self._now.departure = segment, len(segment.events)
            segment.events.append(("depart", step))

    def landing(self, step: int | None) -> None:
        """What fires now was found by this step; None: by the one that runs."""
        self._landing = step

    def event_of(self, pool: str, site: Site, step: int) -> Place | None:
        """Where the event lies in which a check has fired that fires now: the launch of its forward or move, or its
        departure.

        None: it is the last one.
        """
        if (own := self._of_step(step)) is not None:
            if launch := own.last_launch(pool, site):
                return launch.segment, launch.place
            if site == MOVE_SITE and pool in own.moves:
                return own.moves[pool]
        landed = None if self._landing is None else self._of_step(self._landing)
        return None if landed is None else landed.departure

    def _of_step(self, step: int) -> StepEvents | None:
        """None: it is forgotten."""
        return next((own for own in reversed(self._steps) if own.step == step & MASK_32), None)

    # what the host hears

    def learned(self, run: Launched, forward: Learned) -> None:
        launch: RecordedLaunch | None = run.record
        if launch is not None:
            launch.learn(forward, run.substep.layers)

    def heard(self, launches: Sequence[Launch], numbers: array[int]) -> None:
        first, is_large = 0, len(numbers) > MOST_KEPT
        for launch in launches:
            launched: RecordedSeries | None = launch.record
            if launched is not None:
                launched.heard = launch.step, numbers, first, tuple(map(_LAYERS, launched.series.substeps))
                first += launched.num_kept
                launched.segment.array_bytes += 8 * launched.num_kept
                if is_large:
                    _pack(launched)

    def heard_one(self, run: Launched) -> None:
        launch: RecordedLaunch | None = run.record
        if launch is not None:
            launch.told, launch.layers = Heard.of(run), run.substep.layers
            launch.segment.array_bytes += launch.num_bytes
            if launch.num_bytes > 8 * MOST_KEPT:
                _pack([launch])

    def moved(self, src: Ints, dst: Ints) -> None:
        if self._moves:
            recorded, segment = self._moves.popleft()
            recorded.src, recorded.dst = src, dst
            segment.array_bytes += src.nbytes + dst.nbytes

    def noticed(self, hit: StaticHit) -> None:
        own = self._of_step(hit.step) if hit.is_exact else None
        launch = None if own is None else own.last_launch(hit.pool, hit.site)
        if launch is None:
            return
        if hit.code == "W9":
            launch.padding += ((hit.row, hit.entry, hit.slot),)
        elif hit.row >= 0 and hit.place >= 0:
            launch.strays += ((hit.row, hit.place, hit.slot),)


def _pack(launches: Iterable[RecordedLaunch]) -> None:
    for launch in launches:
        launch.segment.array_bytes -= launch.num_bytes
        _ = launch.forward
        launch.segment.array_bytes += launch.num_bytes
