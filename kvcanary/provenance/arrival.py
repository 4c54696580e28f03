"""Arrival: a way back of bytes, a load, a restore or a swap in, and what is known of one that went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcanary.pools.slot_maps import Ints
from kvcanary.provenance.changed_word import ChangedWord
from kvcanary.records.state import PoolState

ONE_WORD, MISROUTED, SHORT = "one word", "misrouted", "short"
STALE, OTHER_LAYOUT, UNKNOWN, NEVER_ISSUED = "stale", "other layout", "unknown", "never issued"
#: What a transfer may have done, likeliest first where as many slots speak for each.
KINDS = (NEVER_ISSUED, ONE_WORD, MISROUTED, SHORT, STALE, OTHER_LAYOUT, UNKNOWN)
NOBODY = -1


class Peer(NamedTuple):
    """An engine elsewhere, and what of it had the bytes: its rank, and an id of its device or process."""

    engine: str
    rank: int
    uuid: str

    def __str__(self) -> str:
        return f"{self.engine} rank {self.rank}"


@dataclass(frozen=True, eq=False)
class Sent:
    """What left together: its number, from 1, the step in which it left, and the pages of the pool that it was.

    Number 0 is no snapshot: what a connector loads is judged by what the same prefix was when it was written here.
    peer: the engine that it left, whose numbers these are; None: this one
    """

    number: int
    step: int
    pages: tuple[int, ...]
    peer: Peer | None = None


@dataclass(frozen=True, eq=False)
class Trip:
    """One way back: a load, a restore or a swap in.

    pages: by page, in order, the snapshot that it left with, its number in that, and the page into which it came back
    """

    how: str
    step: int
    page_size: int
    pages: Sequence[tuple[Sent, int, int]]


@dataclass(frozen=True, eq=False)
class ArrivedSlots:
    """What came back into one pool: n slots that were compared, in the order of the trip; some are wrong.

    places:    [n] their numbers among all slots of the trip;  slots: [n] in the pool;  positions: [n] in the row
    found:     fingerprints of the bytes that lie there now, a [layers, n] and b [n];  expected: those of the parcel
    before:    [layers, n] fingerprint a of what the canary knew to lie there before, 0 where that was nothing
    known, current: [layers, m] fingerprint a of all slots of the trip, and [m] which of these had been written
    """

    pool: PoolState
    places: Ints
    slots: Ints
    positions: Ints
    found: tuple[Ints, Ints]
    expected: tuple[Ints, Ints]
    before: Ints
    known: Ints
    current: NDArray[np.bool_]

    @property
    def differs(self) -> NDArray[np.bool_]:
        """[layers, n]"""
        return self.found[0] != self.expected[0]


@dataclass(frozen=True)
class Origin:
    """Whose bytes a slot of the trip holds: of which snapshot, and its number in it; `detail`: of other kinds."""

    kind: str
    sent: Sent | None = None
    place: int = NOBODY
    detail: str = ""


@dataclass(frozen=True, eq=False)
class PoolArrival:
    """Of one pool: by wrong slot of the trip whose bytes it holds in its first wrong layer.

    layers: that differ;  num_layers: of the pool;  compared: slots of the trip, in order
    """

    name: str
    layers: tuple[int, ...]
    num_layers: int
    compared: Ints
    origins: dict[int, Origin]


@dataclass(frozen=True, eq=False)
class Arrival:
    """What is known of a trip that went wrong.

    kind:  one of KINDS, that of most wrong slots
    pools: those in which something differs;  intact: names of those in which nothing does
    words: by pool and slot of the pool, the one word that changed there
    num_forgotten: snapshots with which nothing could be compared any more, of `num_known` that could
    sentences, evidence: by kind, of objects that have no pages: what happened, and what speaks for it
    """

    trip: Trip
    kind: str
    kinds: Counter[str]
    pools: tuple[PoolArrival, ...]
    intact: tuple[str, ...]
    words: dict[tuple[int, int], ChangedWord] = field(default_factory=dict)
    num_known: int = 0
    num_forgotten: int = 0
    sentences: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def num_pages(self) -> int:
        """Pages of the trip on which something differs."""
        size = self.trip.page_size
        return len({place // size for pool in self.pools for place in pool.origins})

    def turn(self, name: str, place: int) -> int:
        """When a slot of a pool speaks: those of the kind of most slots go first, each in the order of the trip."""
        origin = next(pool.origins[place] for pool in self.pools if pool.name == name)
        return place if origin.kind == self.kind else place + len(self.trip.pages) * self.trip.page_size

    def first(self, kind: str) -> tuple[PoolArrival, dict[int, Origin]]:
        """The first pool with wrong slots of this kind, and these."""
        found = ((pool, {p: o for p, o in pool.origins.items() if o.kind == kind}) for pool in self.pools)
        return next(one for one in found if one[1])
