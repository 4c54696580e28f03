"""ReadQueue: positions of a row in the order in which their bytes were last looked at."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from kvcanary.cards import JOINED, NUM_JOINED, QUEUE_CARD, QUEUE_LENGTH, RANGE

Range = tuple[int, int, int]  # start, end, step in which it was known good


class ReadQueue:
    """Ranges of positions, oldest look first. at: address of what loops let join it, [QUEUE_CARD] int64 (cards.py)."""

    __slots__ = ("_joining", "_ranges", "at")

    def __init__(self) -> None:
        self._joining, self._ranges = array("q", bytes(8 * QUEUE_CARD)), deque[Range]()
        self.at = self._joining.buffer_info()[0]

    @property
    def length(self) -> int:
        """Positions [0, length) are in the queue."""
        return self._joining[QUEUE_LENGTH]

    @property
    def ranges(self) -> deque[Range]:
        """All of them; what has joined since somebody asked is among them now."""
        self.settle()
        return self._ranges

    def settle(self) -> None:
        """There is room for more to join."""
        if count := self._joining[NUM_JOINED]:
            numbers = iter(self._joining[JOINED : JOINED + RANGE * count])
            self._ranges.extend(zip(numbers, numbers, numbers, strict=True))
            self._joining[NUM_JOINED] = 0

    def extend_to(self, length: int, step: int) -> None:
        """Positions [self.length, length) are final; their bytes were known good in `step`, when written."""
        if length > self.length:
            self.ranges.append((self.length, length, step))
            self._joining[QUEUE_LENGTH] = length

    def take(self, count: int, step: int, again: bool = False) -> list[Range]:
        """The `count` positions that waited longest and are looked at now: (start, end, step when last known good).

        again: also those that were looked at in this very step
        """
        taken, ranges = list[Range](), self.ranges
        while count > 0 and ranges and ranges[0][2] < step + again:
            start, end, read = ranges.popleft()
            cut = min(end, start + count)
            if cut < end:
                ranges.appendleft((cut, end, read))
            if ranges and ranges[-1][1:] == (start, step):  # else each token of an answer stays a range for good
                ranges[-1] = ranges[-1][0], cut, step
            else:
                ranges.append((start, cut, step))
            taken.append((start, cut, read))
            count -= cut - start
        return taken

    def looks(self) -> tuple[Range, ...]:
        """Ranges (start, end, step in which their bytes were last known good), oldest look first."""
        return tuple(self.ranges)

    def put(self, looks: list[Range]) -> None:
        """As `looks` has told them."""
        self.clear()
        self._ranges.extend(looks)
        self._joining[QUEUE_LENGTH] = max((end for _, end, _ in looks), default=0)

    def oldest(self) -> int | None:
        """The step of the position that waits longest."""
        return min((step for _, _, step in self.ranges), default=None)

    def last_look(self, position: int) -> int:
        """The step in which the bytes at this position were known good; -1: in none."""
        return next((step for start, end, step in self.ranges if start <= position < end), -1)

    def clear(self) -> None:
        self._joining[QUEUE_LENGTH] = self._joining[NUM_JOINED] = 0
        self._ranges.clear()


def spans(ranges: Iterable[Range]) -> list[tuple[int, int]]:
    """Positions (start, end) of these ranges, those that follow one another as one."""
    found = list[tuple[int, int]]()
    for start, end, _ in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found
