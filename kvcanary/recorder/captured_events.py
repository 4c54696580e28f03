"""CapturedEvents: launches and moves of captured steps in a recording, filled in when the host collects them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from kvcanary.captured.decoded import CollectedRun
from kvcanary.pools.event_log import Event, EventLog
from kvcanary.recorder.kept_forwards import MOST_UNPACKED, RecordedGroup, RecordedLaunch, RecordedMove
from kvcanary_kernels.record.layout import MASK_32

if TYPE_CHECKING:
    from kvcanary.captured.decoded import DecodedForward
    from kvcanary.captured.launch_group import Launch, Launched, LaunchGroup
    from kvcanary.captured.moves import LaunchedMove
    from kvcanary.captured.readback import CapturedViolation
    from kvcanary.recorder.segment import Segment

_LAYERS = attrgetter("layers")
MOVE_SITE = ("move", 0)
MOST_KEPT = 8 * MOST_UNPACKED  # numbers of forwards that were read together: eight an entry
KEPT_STEPS = 8  # behind which nothing of what was launched is collected any more
Site = tuple[str, int]
Place = tuple["Segment", int]


class CapturedEvents:
    """What a recorder has of captured steps; a `captured.step.Listener`.

    All that was launched is collected, before another segment begins.
    """

    def __init__(self, segments: deque[Segment], log: EventLog) -> None:
        """`segments`: of the recording, none where nobody records; `log`: where it is recorded."""
        self._segments, self._log = segments, log
        self._collecting: int | None = None

    def launched(
        self,
        launch_group: LaunchGroup,
        requests: tuple[str, ...],
        written: Sequence[int],
        reads: Sequence[int],
    ) -> RecordedGroup | None:
        """Forwards run next; the rest as `CanaryManager.launch_group` has it.

        What is returned comes back with what the host collects them (`Launch`).
        """
        if not self._segments:
            return None
        launched, append = RecordedGroup(launch_group, requests, written, reads), self._log.append
        for number in range(launch_group.count):
            append(("launch", launched, number))
        return launched

    def launched_move(self, number: int, pool: str) -> RecordedMove | None:
        """A move runs next; as `launched`. `number`: of those in the registry."""
        if not self._segments:
            return None
        recorded = RecordedMove(number, pool)
        self._log.append(("captured_move", recorded))
        return recorded

    def collecting(self, step: int | None) -> None:
        """What fires now was found by this step; None: by the one that runs."""
        self._collecting = step

    def event_of(self, pool: str, site: Site, step: int) -> Place | None:
        """Where the launch of a forward or move lies, or the end of a step, whose check fires now; None: at the end."""
        found = self._last_launch(pool, site, step)
        if found is None and site == MOVE_SITE:
            found = self._last(step, lambda name, *fields: name == "captured_move" and fields[0].pool == pool)
        if found is None and self._collecting is not None:
            found = self._last(self._collecting, lambda name, *_: name == "end_step")
        return found

    def _last_launch(self, pool: str, site: Site, step: int) -> Place | None:
        return self._last(step, lambda name, *fields: name == "launch" and fields[0].is_of(fields[1], pool, site))

    def _last(self, step: int, is_it: Callable[..., bool]) -> Place | None:
        return next((place for place, event in self._of_step(step) if is_it(*event)), None)

    def _of_step(self, step: int) -> list[tuple[Place, Event]]:
        """The events of a step of which somebody may still ask, the last ones first."""
        found, steps, begins = list[tuple[Place, Event]](), 0, -1
        for segment in reversed(self._segments):
            for number in range(len(segment.events) - 1, -1, -1):
                event = segment.events[number]
                if event[0] != "begin_step":
                    found.append(((segment, number), event))
                elif event[1] & MASK_32 == step & MASK_32:
                    return found
                elif (steps := steps + 1) == KEPT_STEPS:
                    return []
                else:
                    found = []
            begins = segment.checkpoint.step  # the step in the middle of which a segment may begin
        return found if begins & MASK_32 == step & MASK_32 else []

    # what the host collects

    def learned(self, run: Launched, forward: DecodedForward) -> None:
        launch: RecordedLaunch | None = run.record
        if launch is not None:
            launch.learn(forward, run.substep.layers)
            self._count(launch.num_bytes)

    def collected(self, launches: Sequence[Launch], moves: Sequence[LaunchedMove], numbers: array[int]) -> None:
        first, is_large = 0, len(numbers) > MOST_KEPT
        for launch in launches:
            launched: RecordedGroup | None = launch.record
            if launched is not None:
                launched.collected = launch.step, numbers, first, tuple(map(_LAYERS, launched.launch_group.substeps))
                first += launched.num_kept
                if is_large:
                    _pack(launched)
                    self._count(sum(own.num_bytes for own in launched))
        for move in moves:
            if move.record is not None:
                end = first + move.move.num_places
                move.record.places, first = numbers[first:end], end
                if is_large:
                    self._count(8 * move.move.num_places)
        if not is_large:
            self._log.ints += first

    def collected_one(self, run: Launched) -> None:
        launch: RecordedLaunch | None = run.record
        if launch is not None:
            launch.collected, launch.layers = CollectedRun.of(run), run.substep.layers
            if launch.num_bytes > 8 * MOST_KEPT:
                _pack([launch])
            self._count(launch.num_bytes)

    def moved(self, run: LaunchedMove) -> None:
        record: RecordedMove | None = run.record
        if record is not None:
            record.places = run.places
            self._count(8 * len(record.places))

    def noticed(self, violation: CapturedViolation) -> None:
        place = self._last_launch(violation.pool, violation.site, violation.step) if violation.is_exact else None
        if place is None:
            return
        segment, number = place
        _, launched, which = segment.events[number]
        launch = launched.launches[which]
        if violation.code == "W9":
            launch.padding += ((violation.row, violation.entry, violation.slot),)
        elif violation.row >= 0 and violation.place >= 0:
            launch.strays += ((violation.row, violation.place, violation.slot),)

    def _count(self, num_bytes: int) -> None:
        """That the newest segment keeps besides."""
        if self._segments:
            self._segments[-1].array_bytes += num_bytes


def _pack(launches: Iterable[RecordedLaunch]) -> None:
    for launch in launches:
        _ = launch.forward
