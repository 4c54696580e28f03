"""ViolationLog: every check that fires is counted, few are kept whole, and no group of checks crowds out another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvcanary.calls.violation import Lineage, Violation
from kvcanary.records.state import PoolState

KEPT_VIOLATIONS = 64  # of each code at each site, until they are taken
PORTION = 1 << 16  # entries that are looked at together
Ints = NDArray[np.int64]
_OF_ALL_ENTRIES = frozenset({"code", "pool", "site", "step", "request_ids", "is_unwritten"})


@dataclass(slots=True, eq=False)
class ViolationBatch:
    """Entries at which one check fired in one forward or re-read, as arrays: row after row, along each row.

    slots:            [n] int64, as the plan named them
    positions:        [n] int64 in their rows; -1: not known
    rows:             [n] int64 into `request_ids`; -1: nobody's
    layers:           [n, layers] bool, those that differ or are missing
    last_good:        [n] int64, step in which the entry was last known good; -1: not known
    found_positions:  [n] int64, for R4
    parent_positions: [n] int64, for W5
    lineages:         [n, 3] int64, for R5, the fields of each `Lineage`
    fingerprint_violations: [n] bool, for R3
    names:            [n] int64, slots of the full group that a slot map sends there; None: slots are the pool's own
    is_unwritten:     for R9, nobody has written these slots, and what lies there is not finite (U1)
    """

    code: str
    pool: PoolState
    site: tuple[str, int]
    step: int
    slots: Ints
    positions: Ints
    rows: Ints
    request_ids: Sequence[str]
    layers: NDArray[np.bool_] | None = None
    last_good: Ints | None = None
    found_positions: Ints | None = None
    parent_positions: Ints | None = None
    lineages: Ints | None = None
    fingerprint_violations: NDArray[np.bool_] | None = None
    names: Ints | None = None
    is_unwritten: bool = False

    def __len__(self) -> int:
        return len(self.slots)

    def at(self, which: Ints) -> ViolationBatch:
        """These entries alone, [n] int64."""
        names = {one.name for one in fields(self)} - _OF_ALL_ENTRIES
        kept: dict[str, Any] = {name: own[which] for name in names if (own := getattr(self, name)) is not None}
        return replace(self, **kept)

    def violation(self, number: int, until: int | None = None) -> Violation:
        """One entry as an object."""
        row = int(self.rows[number])
        return Violation(
            self.code,
            self.pool,
            int(self.slots[number]),
            _known(self.positions, number),
            self.request_ids[row] if row >= 0 else None,
            self.site,
            self.step,
            layers=() if self.layers is None else tuple(np.flatnonzero(self.layers[number]).tolist()),
            last_good=_known(self.last_good, number),
            until=until,
            parent_position=None if self.parent_positions is None else int(self.parent_positions[number]),
            found_position=_known(self.found_positions, number),
            lineage=None if self.lineages is None else Lineage(*self.lineages[number].tolist()),
            fingerprint_violation=self.fingerprint_violations is not None and bool(self.fingerprint_violations[number]),
            named=None if self.names is None else int(self.names[number]),
            is_unwritten=self.is_unwritten,
        )


@dataclass(slots=True, eq=False)
class ViolationGroup:
    """What one code did at one site since the last `take`: the first violations whole, the last one, and how many."""

    kept: list[Violation] = field(default_factory=list)
    last: Violation | None = None
    count: int = 0
    request_ids: set[str] = field(default_factory=set)


class ViolationLog:
    """Violations by (code, site). Its memory is bounded by the groups times KEPT_VIOLATIONS, whatever fires.

    groups: of violations since the last `take`
    watch:  is given every violation as it comes
    """

    def __init__(
        self,
        disabled: Set[str] = frozenset(),
        judged: Callable[[Violation | ViolationBatch], Violation | ViolationBatch | None] | None = None,
    ) -> None:
        """`judged`: what is left of a violation when nothing is judged that was set aside; None: all of every one."""
        self._disabled, self._judged = disabled, judged
        self.watch: Callable[[Violation | ViolationBatch], None] = lambda violation: None
        self.groups: dict[tuple[str, tuple[str, int]], ViolationGroup] = {}

    def __len__(self) -> int:
        """Violations since the last `take`, kept or only counted."""
        return sum(group.count for group in self.groups.values())

    def __iadd__(self, violations: Iterable[Violation | ViolationBatch]) -> Self:
        """`log += violations`: single violations, and batches of any number of entries, in any order."""
        for fired in violations:
            violation = fired if self._judged is None else self._judged(fired)
            if isinstance(violation, ViolationBatch):
                self.add_batch(violation)
            elif violation is not None:
                self.add(violation)
        return self

    def add(self, violation: Violation) -> None:
        """One violation; what may fire for very many entries comes as a batch."""
        if violation.code in self._disabled:
            return
        self.watch(violation)
        group = self.groups.setdefault((violation.code, violation.site), ViolationGroup())
        group.count, group.last = group.count + 1, violation
        if len(group.kept) < KEPT_VIOLATIONS:
            group.kept.append(violation)
        group.request_ids.update(name for name in (violation.request_id, *violation.others) if name is not None)

    def add_batch(self, batch: ViolationBatch) -> None:
        """Any number of entries at once; only those that are kept become objects."""
        if not len(batch) or batch.code in self._disabled:
            return
        self.watch(batch)
        group = self.groups.setdefault((batch.code, batch.site), ViolationGroup())
        chosen = _choose(batch, KEPT_VIOLATIONS - len(group.kept))
        group.kept += [
            batch.violation(number, end) for number, end in zip(chosen, _run_ends(batch, chosen), strict=True)
        ]
        group.count += len(batch)
        group.last = batch.violation(len(batch) - 1)
        group.request_ids |= _requests_of(batch)

    def take(self) -> list[ViolationGroup]:
        """All groups; the log is empty afterwards."""
        groups, self.groups = list(self.groups.values()), {}
        return groups


def _choose(batch: ViolationBatch, room: int) -> list[int]:
    """At most `room` entries: the first of many rows, the first of many pages, and the first ones."""
    n = len(batch)
    if n <= room or room <= 0:
        return list(range(min(n, max(room, 0))))
    pages = batch.positions[:PORTION] // batch.pool.view.page_size
    starts = [*_starts(batch.rows, room // 4), *_starts(pages, room // 4)]
    return sorted(list(dict.fromkeys([*starts, *range(room)]))[:room])


def _starts(values: Ints, most: int) -> list[int]:
    """The first entries that differ from the one before them, and entry 0."""
    starts = [0]
    for first in range(1, len(values), PORTION):
        here, before = values[first : first + PORTION], values[first - 1 : first - 1 + PORTION]
        starts += (np.flatnonzero(here != before[: len(here)])[:most] + first).tolist()
        if len(starts) >= most:
            break
    return starts[:most]


def _run_ends(batch: ViolationBatch, chosen: Sequence[int]) -> list[int | None]:
    """For each chosen entry the last position of the unbroken run of its row; None where it is the run's last."""
    ends: list[int | None] = []
    end = -1
    for number in chosen:
        end = end if number <= end else _run_end(batch, number)
        ends.append(int(batch.positions[end]) if end > number else None)
    return ends


def _run_end(batch: ViolationBatch, first: int) -> int:
    """The last entry that goes on from `first` in its row without a gap."""
    row, position, portion = batch.rows[first], batch.positions[first], 256
    place = first + 1
    while place < len(batch):
        rows, positions = batch.rows[place : place + portion], batch.positions[place : place + portion]
        expected = np.arange(position + place - first, position + place - first + len(rows))
        broken = np.flatnonzero((rows != row) | (positions != expected))
        if len(broken):
            return place + int(broken[0]) - 1
        place, portion = place + portion, PORTION
    return len(batch) - 1


def _requests_of(batch: ViolationBatch) -> set[str]:
    fired = np.zeros(len(batch.request_ids) + 1, dtype=np.bool_)  # one more, for what is nobody's
    fired[batch.rows] = True
    return {batch.request_ids[row] for row in np.flatnonzero(fired[:-1]).tolist()}


def _known(values: Ints | None, number: int) -> int | None:
    """A value where it is known, which is to say not negative."""
    return None if values is None or values[number] < 0 else int(values[number])
