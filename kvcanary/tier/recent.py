"""Recent puts of a tier: whose bytes came back is asked of them; and loads that are under way."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from kvcanary.transfers.object_seals import ObjectSeal

MOST_BYTES = 16 << 20  # of fingerprints that are remembered
MOST_SEALS = 4096


class Load(NamedTuple):
    """What was declared of the load of a key. newest: number of its last put when the load was issued"""

    newest: int
    has_landed: bool = False


class RecentPuts:
    """last: newest first, no more than MOST_SEALS and MOST_BYTES of fingerprints;  newest: by key its last put"""

    def __init__(self) -> None:
        self.last: deque[ObjectSeal] = deque()
        self.newest: OrderedDict[str, ObjectSeal] = OrderedDict()
        self._num_bytes = 0

    def remember(self, seal: ObjectSeal) -> None:
        self.last.appendleft(seal)
        self._num_bytes += _bytes(seal)
        while len(self.last) > MOST_SEALS or self._num_bytes > MOST_BYTES:
            forgotten = self.last.pop()
            self._num_bytes -= _bytes(forgotten)
            if self.newest.get(forgotten.key) is forgotten:
                del self.newest[forgotten.key]
        if self.last:
            self.newest[seal.key] = seal

    def newer(self, seal: ObjectSeal, until: int | None) -> ObjectSeal | None:
        """A later put of the same key by the same tier that left other bytes; until: number of the last that counts."""
        newest = self.newest.get(seal.key)
        if newest is None or newest.origin != seal.origin or newest.number <= seal.number or newest.holds_what(seal):
            return None
        return newest if until is None or newest.number <= until else None


def _bytes(seal: ObjectSeal) -> int:
    return sum(fingerprints.nbytes for fingerprints in seal.fingerprints)
