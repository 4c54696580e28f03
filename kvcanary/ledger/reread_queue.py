"""ReadQueue: positions of a row in the order in which their bytes were last read."""

from __future__ import annotations

from array import array

import numpy as np

from kvcanary.native.layout import QUEUE, RANGE, RANGES_TO_SPARE, TAKEN
from kvcanary.pools.slot_maps import Ints

Range = tuple[int, int, int]  # start, end, step in which it was known good
LEAST_ROOM = 16


class ReadQueue:
    """Ranges of positions, oldest re-read first, where compiled loops read and write them.

    at: address of its struct, [QUEUE.size] int64 (native/layout.py), which stays
    """

    __slots__ = ("_ring", "_struct", "at")

    def __init__(self) -> None:
        self._struct = array("q", bytes(8 * QUEUE.size))
        self.at = self._struct.buffer_info()[0]
        self._fill(np.empty((0, RANGE.size), np.int64))

    @property
    def length(self) -> int:
        """Positions [0, length) are in the queue."""
        return self._struct[QUEUE.length]

    def make_room(self) -> None:
        """For what joins in a step, and for what a re-read cuts off."""
        if self._struct[QUEUE.num_ranges] + RANGES_TO_SPARE > self._struct[QUEUE.room]:
            self._fill(self.numbers())

    def extend_to(self, length: int, step: int) -> None:
        """Positions [self.length, length) are final; their bytes were known good in `step`, when written."""
        from kvcanary.native.loops import extend_queue

        self.make_room()
        extend_queue(self.at, length, step)

    def take(self, count: int, step: int, again: bool = False) -> list[Range]:
        """The `count` positions that waited longest and are read now: (start, end, step when last known good).

        again: also those that were read in this very step
        """
        from kvcanary.native.loops import take_ranges

        self.make_room()
        taken = np.empty((self._struct[QUEUE.num_ranges], TAKEN.size), np.int64)
        found = take_ranges(self.at, count, step + again, step, taken.ctypes.data)
        return [(start, end, read) for _, start, end, read in taken[:found].tolist()]

    def oldest_first(self) -> tuple[Range, ...]:
        """Ranges (start, end, step in which their bytes were last known good), oldest re-read first."""
        return tuple((start, end, step) for start, end, step in self.numbers().tolist())

    def numbers(self) -> Ints:
        """[ranges, RANGE.size] int64 in their order, a copy: `ranges` as one array."""
        first, count = self._struct[QUEUE.first], self._struct[QUEUE.num_ranges]
        return self._ring.take(range(first, first + count), 0, mode="wrap")

    def put(self, ranges: list[Range]) -> None:
        """As `ranges` has told them."""
        self._fill(np.array(ranges, np.int64).reshape(-1, RANGE.size))
        self._struct[QUEUE.length] = max((end for _, end, _ in ranges), default=0)

    def oldest(self) -> int | None:
        """The step of the position that waits longest."""
        from kvcanary.native.loops import oldest_read

        return int(oldest_read(self.at)) if self._struct[QUEUE.num_ranges] else None

    def last_read(self, position: int) -> int:
        """The step in which the bytes at this position were known good; -1: in none."""
        return next((step for start, end, step in self.oldest_first() if start <= position < end), -1)

    def clear(self) -> None:
        self.put([])

    def _fill(self, ranges: Ints) -> None:
        """The queue is these, and has room for as many again."""
        count = len(ranges)
        room = max(2 * count, LEAST_ROOM)
        self._ring = np.empty((room, RANGE.size), np.int64)
        self._ring[:count] = ranges
        self._struct[QUEUE.num_ranges], self._struct[QUEUE.room], self._struct[QUEUE.first] = count, room, 0
        self._struct[QUEUE.ranges] = self._ring.ctypes.data
