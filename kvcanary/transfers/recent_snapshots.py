"""Departures: what left the pools lately, parcel by parcel, so that bytes of another one are known by their lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.provenance.arrival import Sent

MOST_BYTES = 16 << 20  # of lanes that are remembered
MOST_PARCELS = 256


class Lanes(NamedTuple):
    """Of one pool, n slots in page order: lane a [layers, n] int64, and [n] which slots had been written."""

    lane_a: Tensor
    current: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Departed:
    """A parcel as it left; ``pools``: by number of the pool."""

    sent: Sent
    pools: Mapping[int, Lanes]

    @property
    def num_bytes(self) -> int:
        return sum(lanes.lane_a.nbytes for lanes in self.pools.values())


class Departures:
    """The last parcels, newest first in ``last``; no more than MOST_PARCELS and MOST_BYTES of them.

    num_forgotten: older ones, of which nothing can be told any more
    """

    def __init__(self) -> None:
        self.last: deque[Departed] = deque()
        self.num_forgotten = 0
        self._num_sent = self._num_bytes = 0

    def number(self, step: int, pages: tuple[int, ...]) -> Sent:
        """What leaves now."""
        self._num_sent += 1
        return Sent(self._num_sent, step, pages)

    def remember(self, departed: Departed) -> None:
        """Its lanes are not copied; the oldest parcels are forgotten for it."""
        self.last.appendleft(departed)
        self._num_bytes += departed.num_bytes
        while len(self.last) > MOST_PARCELS or self._num_bytes > MOST_BYTES:
            self._num_bytes -= self.last.pop().num_bytes
            self.num_forgotten += 1
