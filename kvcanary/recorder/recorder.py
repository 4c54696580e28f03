"""Recorder: the last steps of an engine as its canary was told of them, in bounded memory, for a dump.

Every call of the manager that changes what is true is noted with plain arguments, every forward with its plans. Rows
that name what their requests were granted are not kept: they follow from the grants. All events lie in segments, each
behind a checkpoint from which they can be followed; the oldest segment is dropped when enough steps follow it, or too
many bytes.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.codes import UNWRITTEN
from kvcanary.pools.event_log import LONG, Event, EventLog, nowhere
from kvcanary.recorder.checkpoint import ManagerState, room_for_records, take_checkpoint
from kvcanary.recorder.forward_events import ForwardEvents
from kvcanary.recorder.segment import EVENT_BYTES, PARTS, SPARE, Damage, Segment
from kvcanary.transfers.seal import Seal
from kvcanary.transfers.snapshots import PageSnapshot

MOST_BYTES = 64 << 20  # of all segments together
INT_BYTES = 8
MOST_DAMAGED = 256  # slots that one check may name: a replay that reaches these reaches the finding
MOST_SNAPSHOTS = 4096  # that may be away at a time
RECORDS = 4  # part of the bytes that the records of one checkpoint may take
_PLAIN = frozenset({str, int, bool, float, type(None)})
_NOTHING: tuple[()] = ()

P = ParamSpec("P")
T = TypeVar("T")


class Recorder:
    """The ring of one manager; it records from `start` on, and nothing with 0 steps.

    log:      where events are recorded
    maps:     pools behind a slot map, whose changes are events too
    forwards: is told of forwards and of captured moves
    """

    def __init__(self, manager_state: ManagerState, steps: int, most_bytes: int = MOST_BYTES) -> None:
        self.manager_state = manager_state
        self.steps, self.most_bytes = steps, most_bytes
        self.segments: deque[Segment] = deque()
        self._most_newest = 0  # bytes of the newest segment, up to which `is_due` looks no closer
        self.maps: dict[str, tuple[Tensor, Any]] = {}
        self.log = EventLog()
        self._rooms: list[NDArray[np.int64]] = []  # for records of segments to come
        self.forwards = ForwardEvents(self.segments, self.log)
        self._add = self.forwards.add
        self._snapshots: dict[int, tuple[PageSnapshot, int]] = {}
        self._num_snapshots = 0

    @property
    def is_on(self) -> bool:
        return bool(self.segments)

    @property
    def num_bytes(self) -> int:
        """Of all segments, and of the memory that waits for those to come."""
        self._count_arrays()
        return sum(segment.num_bytes for segment in self.segments) + sum(room.nbytes for room in self._rooms)

    def start(self, step: int) -> None:
        """The canary is armed: what comes is recorded, if steps were asked for."""
        if self.steps:
            views = [pool.view for pool in self.manager_state.state.pools]
            self.maps = {view.name: (view.slot_map, None) for view in views if view.slot_map is not None}
            rooms = (room_for_records(self.manager_state, self.most_bytes // RECORDS) for _ in range(PARTS + 1))
            self._rooms = [room for room in rooms if room is not None]
            self.begin_segment(step)

    def stop(self) -> None:
        """What was recorded is forgotten, and nothing more is until `start`."""
        self.segments.clear()
        self.log.append = nowhere()
        self._rooms.clear()
        self.forwards.forget()

    # what happens

    def is_due(self, step: int) -> bool:
        """Whether behind this step `begins_segment`, or there may be no room and `tick` must look."""
        if not self.segments:
            return False
        newest, log = self.segments[-1], self.log  # whose `num_bytes` would be a call in every step
        size = newest.array_bytes + INT_BYTES * log.ints + EVENT_BYTES * len(newest.events)
        return step >= newest.end_step or size > self._most_newest

    def begins_segment(self, step: int) -> bool:
        """Whether one begins behind this step; once all that waits was judged."""
        self._count_arrays()
        newest = self.segments[-1]
        return step >= newest.end_step or newest.num_bytes > newest.end_bytes

    def begin_segment(self, step: int) -> None:
        """What comes can be followed from the state of now; segments that nobody needs go, and leave their memory."""
        self._count_arrays()
        while len(self.segments) > 1 and step - self.segments[1].checkpoint.step >= self.steps:
            gone = self.segments.popleft().checkpoint.records
            self._rooms += [] if gone is None else [gone.view(np.int64)]
        room = self._rooms.pop() if self._rooms else room_for_records(self.manager_state, self.most_bytes // RECORDS)
        checkpoint = take_checkpoint(self.manager_state, step, room)
        self.segments.append(Segment(checkpoint, -(-self.steps // PARTS), self._room))
        self.log.append = self._noted if self.maps else self.segments[-1].events.append
        self._limit_newest()
        for name, (slot_map, _) in self.maps.items():
            self.maps[name] = slot_map, None

    def tick(self) -> None:
        """A step was checked: what there is no room for goes, memory that waits before segments."""
        while (self._rooms or len(self.segments) > 1) and self.num_bytes > self._room:
            if self._rooms:
                self._rooms.pop()
            else:
                self.segments.popleft()
        self._limit_newest()

    @property
    def _room(self) -> int:
        """The next step needs some before anybody looks again."""
        return self.most_bytes - self.most_bytes // SPARE

    def _limit_newest(self) -> None:
        """For `is_due`: the newest segment is another, or what lies beside it has become more or less."""
        self._count_arrays()
        newest = self.segments[-1]
        self._most_newest = min(newest.end_bytes, self._room + newest.num_bytes - self.num_bytes)

    def note(self, *event: Any) -> None:
        """A call of the manager, or of its async tracker, is about to run: its name, then its arguments."""
        if not self.segments:
            return
        if not _PLAIN.issuperset(map(type, event)):
            event = tuple([arg if type(arg) in _PLAIN or arg is _NOTHING else self._kept(arg) for arg in event])
        self.log.append(event)

    def fired(self, violation: Violation | ViolationBatch) -> None:
        """A check fired while the last event ran, or a captured forward: what it found damaged is part of that."""
        if not self.segments or violation.code not in _DAMAGE:
            return
        if isinstance(violation, Violation) and violation.state is not None:
            return
        place = self.forwards.event_of(violation.pool.name, violation.site, violation.step)
        segment, number = place or (self.segments[-1], max(len(self.segments[-1].events) - 1, 0))
        violations = (
            [violation.violation(n) for n in range(min(len(violation), MOST_DAMAGED))]
            if isinstance(violation, ViolationBatch)
            else [violation]
        )
        damage = _damage([one for one in violations if 0 <= one.slot < one.pool.view.num_slots])
        if damage:
            segment.add_damage(number, damage)
            self._limit_newest()

    def note_maps(self) -> None:
        """What has changed in the slot maps since the last re-read."""
        for name, (slot_map, before) in self.maps.items():
            now = slot_map.detach().cpu().numpy()
            where = np.arange(len(now)) if before is None else np.flatnonzero(now != before)
            if len(where):
                self._add(("map", name, where, now[where].copy()))
                self.segments[-1].array_bytes += 16 * len(where)
                self.maps[name] = slot_map, now.copy()

    def number_snapshot(self, snapshot: PageSnapshot) -> None:
        """What left has a number, by which the way back is known."""
        if self.segments:
            self._snapshots[id(snapshot)] = snapshot, self._num_snapshots
            self._add(("parcel", self._num_snapshots))
            self._num_snapshots += 1
            while len(self._snapshots) > MOST_SNAPSHOTS:
                del self._snapshots[next(iter(self._snapshots))]

    # helpers

    def _count_arrays(self) -> None:
        """Those of events that were recorded since."""
        if self.segments:
            self.segments[-1].array_bytes += INT_BYTES * self.log.ints
        self.log.ints = 0

    def _noted(self, event: Event) -> None:
        """Behind what has changed in slot maps."""
        self.note_maps()
        self._add(event)

    def _number_of(self, snapshot: Seal) -> int:
        """-1 of one that left before the recording."""
        return self._snapshots[id(snapshot)][1] if id(snapshot) in self._snapshots else -1

    def _kept(self, value: Any) -> Any:
        """An argument that nobody can change any more; of snapshots their numbers."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if (kind is list or kind is tuple) and len(value) < LONG and _PLAIN.issuperset(map(type, value)):
            return tuple(value)
        if isinstance(value, Seal):
            return self._number_of(value)
        if isinstance(value, list) and value and isinstance(value[0], Seal):
            value = [self._number_of(snapshot) for snapshot in value]
        if isinstance(value, list | tuple) and value and isinstance(value[0], str):
            return tuple(value)
        if isinstance(value, Tensor):
            value = value.detach().cpu().numpy()
        if len(value) < LONG:
            return tuple(map(int, value))
        kept = np.array(value, np.int64)
        self.segments[-1].array_bytes += kept.nbytes
        return kept


def recorded(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of the manager whose calls are events of its `recorder`."""
    name, signature = method.__name__, inspect.signature(method)

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        recorder = self.recorder
        if recorder.segments:
            given: Sequence[Any] = args
            if kwargs:
                bound = signature.bind(self, *args, **kwargs)
                bound.apply_defaults()
                given = bound.args[1:]
            recorder.note(name, *given)
        return method(self, *args, **kwargs)

    return call


#: Of the sixteen 32-bit words of a record, those that say nothing of texts or keys: position, request, generation,
#: step, site and the layers written.
PUBLIC_WORDS = (1, 4, 5, 6, 7, 10, 11, 12, 13)
#: Checks of bytes and fingerprints: what they find is no consequence of any call, so that a replay must be told of it.
_BYTES = frozenset({"R3", "R9", "T1", "P1"})
_DAMAGE = _BYTES | {"R4", "R5", "R7", "R8", "R11", "R12"}


def _damage(violations: Sequence[Violation]) -> list[Damage]:
    """What these violations of one pool say of bytes and records; the others are consequences of calls."""
    if not violations:
        return []
    pool, damage = violations[0].pool, []
    slots = torch.tensor([violation.slot for violation in violations], device=pool.records.device)
    found, expected = (rows[slots].cpu().numpy().view(np.uint32) for rows in (pool.records, pool.expected))
    differing = (found != expected) @ (1 << np.arange(found.shape[1]))
    for violation, halves, words in zip(
        violations, differing.tolist(), found[:, list(PUBLIC_WORDS)].tolist(), strict=True
    ):
        is_strange = halves or violation.code == "R11"
        if is_strange or violation.code in _BYTES:
            own = tuple(words) if is_strange else ()
            code = UNWRITTEN if violation.is_unwritten else violation.code
            damage.append(
                Damage(code, pool.name, violation.slot, violation.layers, violation.fingerprint_violation, halves, own)
            )
    return damage
