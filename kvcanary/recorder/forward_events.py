"""ForwardEvents: forwards and captured moves in a recording, filled in when the host has judged or collected them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcanary.captured.decoded import CollectedRun
from kvcanary.pools.event_log import Event, EventLog
from kvcanary.recorder.kept_forwards import MOST_UNPACKED, RecordedForward, RecordedGroup, RecordedLaunch, RecordedMove
from kvcanary_kernels.record.layout import MASK_32

if TYPE_CHECKING:
    from kvcanary.calls.forward import Forward
    from kvcanary.captured.decoded import DecodedForward
    from kvcanary.captured.launch_group import Launch, Launched, LaunchGroup
    from kvcanary.captured.moves import LaunchedMove
    from kvcanary.captured.readback import CapturedViolation
    from kvcanary.checks.rows import Verdict
    from kvcanary.recorder.segment import Segment

_LAYERS = attrgetter("layers")
MOVE_SITE = ("move", 0)
MOST_KEPT = 8 * MOST_UNPACKED  # numbers of forwards that were read together: eight an entry
KEPT_STEPS = 8  # behind which nothing of what was launched is collected any more
Site = tuple[str, int]
Place = tuple["Segment", int]


class ForwardEvents:
    """What a recorder has of forwards, those that the host judges and captured ones; a `captured.step.Listener`.

    All that was opened is judged, and all that was launched is collected, before another segment begins.
    """

    def __init__(self, segments: deque[Segment], log: EventLog) -> None:
        """`segments`: of the recording, none where nobody records; `log`: where it is recorded."""
        self._segments, self._log = segments, log
        self._waiting: dict[int, RecordedForward] = {}
        self._room_for_plans: NDArray[np.int32] = np.empty(0, np.int32)
        self._collecting: int | None = None

    def add(self, event: Event) -> None:
        """With slot maps as they were noted last, where somebody records."""
        if self._segments:
            self._segments[-1].events.append(event)

    def forget(self) -> None:
        """Nobody records any more."""
        self._waiting.clear()

    # forwards that the host judges

    def opened(self, forward: Forward) -> None:
        """A forward was opened; its rows are known when it is judged."""
        if not self._segments:
            return
        recorded = RecordedForward(forward)
        self._waiting[id(forward)] = recorded
        self._log.append(("forward", recorded))

    def closed(self, pool: str) -> None:
        """The open forward of this pool is closed."""
        self.add(("close", pool))

    def stored_again(self, pool: str, layer: int) -> None:
        """A layer of the open forward of this pool has stored before, and does again."""
        self.add(("store", pool, layer))

    def judged(self, forwards: Sequence[Forward], verdict: Verdict) -> None:
        """These forwards were judged: their plans are kept, and the rows that are not as granted."""
        if not self._waiting:
            return
        suspects: dict[int, set[int]] = {}
        for segment in verdict.suspects:
            suspects.setdefault(id(segment.forward), set()).add(segment.row)
        for forward in forwards:
            self._keep(forward, suspects.get(id(forward), ()))

    def proved(self, forwards: Sequence[Forward]) -> None:
        """These forwards were judged, and a loop has proved every row to be as granted."""
        if not self._waiting:
            return
        heads = np.array([forward.head for forward in forwards], np.int64)
        ends = np.empty((len(heads), 2), np.int64)
        keep_plans = forwards[0].pool.loops.keep_plans
        size = keep_plans(heads, self._room_for_plans, ends)
        if size > len(self._room_for_plans):
            self._room_for_plans = np.empty(2 * size, np.int32)
            size = keep_plans(heads, self._room_for_plans, ends)
        if size < 0:
            for forward in forwards:
                forward.read_rows()
                self._keep(forward, ())
            return
        values = self._room_for_plans[:size].copy()
        self._count(values.nbytes)
        begin = 0
        for forward, (middle, end) in zip(forwards, ends.tolist(), strict=True):
            recorded = self._waiting.pop(id(forward), None)
            if recorded is not None:
                recorded.keep_clean(forward, values[begin:middle], values[middle:end])
            begin = end

    def wait_over(self) -> None:
        """Forwards that were not judged yet, with the rows that they have now; for a dump in mid-step."""
        for recorded in self._waiting.values():
            recorded.keep_unjudged()

    def _keep(self, forward: Forward, suspects: Iterable[int]) -> None:
        recorded = self._waiting.pop(id(forward), None)
        if recorded is not None:
            recorded.keep(forward, suspects)
            self._count(recorded.num_bytes)

    # what was launched

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
