"""RecentSnapshots: what left the pools lately, snapshot by snapshot, so that bytes of another one are known by their
fingerprints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.provenance.arrival import Sent

MOST_BYTES = 16 << 20  # of fingerprints that are remembered
MOST_SNAPSHOTS = 256


class SnapshotFingerprints(NamedTuple):
    """Of one pool, n slots in page order: fingerprint a [layers, n] int64, and [n] which slots had been written."""

    fingerprint_a: Tensor
    current: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SentSnapshot:
    """A snapshot as it left; ``pools``: by number of the pool."""

    sent: Sent
    pools: Mapping[int, SnapshotFingerprints]

    @property
    def num_bytes(self) -> int:
        return sum(fingerprints.fingerprint_a.nbytes for fingerprints in self.pools.values())


class RecentSnapshots:
    """The last snapshots, newest first in ``last``; no more than MOST_SNAPSHOTS and MOST_BYTES of them.

    num_forgotten: older ones, of which nothing can be told any more
    """

    def __init__(self) -> None:
        self.last: deque[SentSnapshot] = deque()
        self.num_forgotten = 0
        self._num_sent = self._num_bytes = 0

    def number(self, step: int, pages: tuple[int, ...]) -> Sent:
        """What leaves now."""
        self._num_sent += 1
        return Sent(self._num_sent, step, pages)

    def remember(self, sent_snapshot: SentSnapshot) -> None:
        """Its fingerprints are not copied; the oldest snapshots are forgotten for it."""
        self.last.appendleft(sent_snapshot)
        self._num_bytes += sent_snapshot.num_bytes
        while len(self.last) > MOST_SNAPSHOTS or self._num_bytes > MOST_BYTES:
            self._num_bytes -= self.last.pop().num_bytes
            self.num_forgotten += 1
