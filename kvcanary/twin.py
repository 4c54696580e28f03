"""What the canary itself wrote: the host's copy of every record, and the rows that were judged with it.

Judging an entry of a row is a pure function of records, slots and positions. While a row names the same slots and
their records are bit for bit those that the canary wrote, the verdict stands; so a step judges only what is new, and
compares the rest. Anything unequal is judged in full from the records themselves (reading.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

SLOT_BYTES = 8  # of a slot id in an index array


#: One record as the canary wrote it, enough to judge what reads it: position, chain, chain of the entry that it
#: continues, and generation of its page when it was written (INCOMPLETE where a layer did not store). A plain tuple:
#: there is one for every entry that is written.
Written = tuple[int, int, int, int]
INCOMPLETE = -1
NEVER: Written = (-1, 0, 0, INCOMPLETE)


@dataclass(slots=True)
class KnownRow:
    """The row of one request in one pool as index arrays have named it.

    raw:    its slot ids, as bytes
    judged: entries that were judged clean, in `step`, while the twin was in `epoch`
    """

    raw: bytes = b""
    judged: int = 0
    epoch: int = 0
    step: int = 0

    def extend(self, prefix: bytes) -> bytes:
        """A longer row that begins like the known one becomes the known one; what is known of it then."""
        if prefix.startswith(self.raw):
            self.raw = prefix
        return self.raw


class Twin:
    """The host's copy of all records, by row of the records of all pools."""

    def __init__(self) -> None:
        self.epoch = 0
        self._written: dict[int, Written] = {}
        self._judged: set[int] = set()  # rows of the entries that known rows have judged

    def chain(self, row: int) -> int:
        """Chain value of the record; 0 where nobody has written."""
        return self._written.get(row, NEVER)[1]

    def write(self, rows: Collection[int], written: Iterable[Written]) -> None:
        """These records are new. When one lies inside a judged row, every row is judged again."""
        if not self._judged.isdisjoint(rows):
            self.forget_verdicts()
        self._written.update(zip(rows, written, strict=True))

    def move(self, src: Sequence[int], dst: Sequence[int], generations: Sequence[int]) -> None:
        moved = [self._written.get(row, NEVER) for row in src]
        self.write(
            dst,
            [
                (position, chain, continues, INCOMPLETE if was == INCOMPLETE else generation)
                for (position, chain, continues, was), generation in zip(moved, generations, strict=True)
            ],
        )

    def forget_verdicts(self) -> None:
        """Pages were freed, or a judged entry was written again: no verdict stands."""
        self.epoch += 1
        self._judged.clear()

    def judge(self, start: int, before: int, rows: Sequence[int], grants: Sequence[int]) -> bool:
        """Whether these records stand at positions from `start` on, continue `before` and each other, and are whole."""
        written = self._written
        for position, (row, grant) in enumerate(zip(rows, grants, strict=True), start):
            found = written.get(row, NEVER)
            if found[0] != position or found[2] != before or found[3] != grant:
                return False
            before = found[1]
        self._judged.update(rows)
        return True
