"""Segments of a recording: some steps of an engine, behind a checkpoint from which they can be followed."""

from __future__ import annotations

from typing import NamedTuple

from kvcanary.pools.event_log import Event
from kvcanary.recorder.checkpoint import Checkpoint

EVENT_BYTES = 240  # of one event without arrays: its tuple, names and small integers
DAMAGE_BYTES = 400  # of one damaged slot
SPARE = 16  # part of the bytes that the newest step may take, and that a segment's events may at least
PARTS = 2  # segments that the steps asked for are cut into


class Damage(NamedTuple):
    """Bytes or records that a check found damaged, as a replay brings it about before the call in which it fired.

    layers:      whose bytes differ, or whose fingerprints where `fingerprint` is true
    halves:      bit 2c + h: half h (low, high) of column c of the record differs from what the canary wrote
    words:       the words of the record that PUBLIC_WORDS names, where halves differ or nobody declared the record
    """

    code: str
    pool: str
    slot: int
    layers: tuple[int, ...]
    fingerprint: bool
    halves: int
    words: tuple[int, ...] = ()


class Segment:
    """Some steps: the state before them, and what happened, in order.

    damage: by the number of the event in which a check fired, what it found
    start_bytes: of the state before them
    end_step, end_bytes: behind this step, or with more bytes than these, another begins
    """

    def __init__(self, checkpoint: Checkpoint, steps: int, room: int) -> None:
        """`steps`: that it has; `room`: bytes of all segments together."""
        self.checkpoint = checkpoint
        self.events: list[Event] = []
        self.damage: dict[int, list[Damage]] = {}
        self.start_bytes = checkpoint.num_bytes
        self.array_bytes = self.start_bytes  # and those of damage
        self.end_step = checkpoint.step + steps
        self.end_bytes = max(self.start_bytes + room // SPARE, room // (PARTS + 1))  # a large pool's start is large

    @property
    def num_bytes(self) -> int:
        return self.array_bytes + EVENT_BYTES * len(self.events)

    def add_damage(self, number: int, damage: list[Damage]) -> None:
        """Found while the event of this number ran."""
        self.damage.setdefault(number, []).extend(damage)
        self.array_bytes += DAMAGE_BYTES * len(damage)
