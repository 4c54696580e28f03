"""Violations: single checks that fired, and how they are joined so that one fault is one incident."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcanary.calls.forward import Ints
from kvcanary.calls.state_facts import StateFacts
from kvcanary.codes import (
    ARRIVED,
    CAME_BACK,
    CODES,
    MISREAD,
    NOT_FINITE,
    OF_STATES,
    RANK,
    READS_ELSE,
    SPEAK_FIRST,
    UNWRITTEN,
    Code,
)
from kvcanary.records.state import PoolState

if TYPE_CHECKING:
    from kvcanary.provenance.arrival import Arrival
    from kvcanary.provenance.changed_word import ChangedWord

NO_SLOT = -1  # of violations that have no place, as those of forwards that ran without hooks
#: What is found in rows of which no hook has told what was written.
FOLLOWING = frozenset({"W5", "T1", "R12", "R4", "R5", "R10", "R9", "R6", "H1"})
NO_BRANCH = -1
POSITION_BITS = 40  # more than a position has


class Lineage(NamedTuple):
    """Of a row of a draft forward that does not read what it should go on from; branches of its request.

    branch: the row's own
    parent: of the draft forward before, that from which it descends, as the engine says
    found:  that whose entry it reads instead; NO_BRANCH (-1): none's
    """

    branch: int
    parent: int
    found: int


@dataclass(slots=True, eq=False)
class Violation:
    """One check that fired at one place.

    slot:      as the plan named it; outside the pool for R1 and W1
    position:  where the entry stands in its row
    request_id: whose row it is
    site:      substep kind and index of the forward that read or wrote, or of the canary's own re-read
    layers:    layers that differ; empty where that says nothing
    last_good: step in which this was last known good
    until:     position of the last entry of an unbroken run of the row that this violation speaks for; None: itself
               alone
    parent_position: for W5, the position of the parent
    found_position:  for R4, the position that the record has
    lineage:   for R5, where it contradicts what the engine says of a draft's branches
    row_slots: for R6, the slots of the row
    fingerprint_violation: for R3, fingerprint a disagrees but fingerprint b over all layers is right
    is_unwritten: for R9, nobody has written the slot, and what lies there is not finite (U1)
    is_unhooked: for H1, a forward of these requests ran without hooks: what their rows show since then follows from it
    named:     slot of the full group that a slot map sends to `slot`; None: the pool's slots are those of the plans
    arrival:   for T1 of bytes that came back, what is known of their way; `arrived_as`: number of this slot there
    is_captured: the device found it, in a forward that is replayed
    others:    requests besides whose rows read the same place, with the same result, or a place that nobody can tell
    message:      for L1, what the typed error says; of watched pools, what moved the bytes
    expected, found: what the report should say, where the code alone does not tell it
    word:      the one word that changed, where whoever found it has looked for it
    row_number: in a cache without pages, which row of the batch it is: that stands for the page
    along:     the cache, and the batch in it, whose index arrays named the slot: what they name wrong is one incident,
               and so is what is named wrong for the same request later
    notes:     lines of evidence that it brings along
    state:     where the slot is an entry of a StateView, what is known of the state in it
    misread:   for R8 of a probe, family and text of what attention did instead, and what speaks for it
    """

    code: str
    pool: PoolState
    slot: int
    position: int | None
    request_id: str | None
    site: tuple[str, int]
    step: int
    layers: tuple[int, ...] = ()
    last_good: int | None = None
    until: int | None = None
    parent_position: int | None = None
    found_position: int | None = None
    lineage: Lineage | None = None
    row_slots: Sequence[int] | Ints = ()
    fingerprint_violation: bool = False
    is_unwritten: bool = False
    is_unhooked: bool = False
    named: int | None = None
    is_captured: bool = False
    others: tuple[str, ...] = ()
    expected: dict[str, Any] | None = None
    found: dict[str, Any] | None = None
    arrival: Arrival | None = None
    arrived_as: int = 0
    message: str = ""
    word: ChangedWord | None = None
    row_number: int | None = None
    along: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    state: StateFacts | None = None
    misread: tuple[str, str, tuple[str, ...]] | None = None

    @property
    def meaning(self) -> Code:
        """What the violation says."""
        if self.arrival is not None:
            return CAME_BACK
        if self.misread is not None:
            return READS_ELSE
        return NOT_FINITE if self.is_unwritten else CODES[self.code]

    @property
    def kind(self) -> str:
        """The code, or what stands for it where its causes are others."""
        if self.arrival is not None:
            return ARRIVED
        if self.misread is not None:
            return MISREAD
        return UNWRITTEN if self.is_unwritten else self.code

    @property
    def sentence(self) -> str:
        """The same in words, and of a contradiction what contradicts what."""
        sentence = self.meaning.sentence if self.state is None else OF_STATES.get(self.code, self.meaning.sentence)
        return f"{sentence}: {self.message}" if self.message else sentence

    @property
    def page(self) -> int:
        """Whose grant, owner and state count for the slot."""
        if self.row_number is not None:
            return self.row_number
        return (self.slot if self.named is None else self.named) // self.pool.view.page_size

    @property
    def offset(self) -> int:
        """Of the slot within its page."""
        return self.slot % self.pool.view.page_size if self.row_number is None else self.position or 0

    @property
    def place(self) -> tuple[object, ...]:
        """What has a number of its own: a slot of a pool; an entry of a row; a forward without the canary."""
        if self.row_number is not None:
            return self.pool.pool_id, self.request_id, self.position
        where = self.pool.pool_id, self.slot
        return (*where, self.site, self.code) if self.code in ("H1", "X1", "X2") else where

    @property
    def places(self) -> list[tuple[object, ...]]:
        """All under which it is known when it fires again."""
        if self.code == "N1" and self.row_number is None:  # what a request stores from then on follows from that
            return [self.place, *((self.code, name) for _, name in self.rows if name is not None)]
        if self.along is None:
            return [self.place]
        return [self.place, *(("along", self.along[0], name) for _, name in self.rows if name is not None)]

    @property
    def run(self) -> int:
        """Entries that this violation speaks for."""
        return 1 if self.until is None or self.position is None else self.until - self.position + 1

    @property
    def row(self) -> tuple[int, str | None]:
        return self.pool.pool_id, self.request_id

    @property
    def rows(self) -> list[tuple[int, str | None]]:
        """All of them."""
        return [(self.pool.pool_id, name) for name in (self.request_id, *self.others)]


def join_violations(violations: Sequence[Violation]) -> list[list[Violation]]:
    """Incidents, the violation that speaks first; the others are its evidence.

    Violations are one incident when they share the slot; the page and the step; the arrival; the index arrays; when
    their entries are neighbours in one row (what follows a wrong entry breaks too); when a wrong position points at
    another of them (an exchange); when one is R6 and the other lies in the same row; or when one is a forward without
    hooks and the other is such a one of the same step, or follows from it.
    """
    parents = list(range(len(violations)))
    for first, second in _related(violations):
        parents[_root(parents, second)] = _root(parents, first)
    incidents: dict[int, list[Violation]] = {}
    for number, violation in enumerate(violations):
        incidents.setdefault(_root(parents, number), []).append(violation)
    joined = [_without_repeats(sorted(incident, key=speaks_first)) for incident in incidents.values()]
    return sorted(joined, key=lambda incident: speaks_first(incident[0]))


def fair_share(incidents: Sequence[list[Violation]], most: int) -> list[list[Violation]]:
    """At most so many incidents, in their order; every code at every site gets its first before any its second."""
    turns: dict[tuple[object, ...], int] = {}
    order = []
    for number, incident in enumerate(incidents):
        group = incident[0].code, incident[0].site
        turns[group] = turns.get(group, -1) + 1
        order.append((turns[group], number))
    return [incidents[number] for number in sorted(number for _, number in sorted(order)[:most])]


def speaks_first(violation: Violation) -> tuple[bool, bool, bool, bool, bool, int, int, int]:
    """Forwards without hooks, then their entries; events that contradict; grants and writes before moves before reads;
    then along the row; at one slot by rank; the first pool before the second.

    Of bytes that came back, what happened to most of them goes before all else, in the order in which they came.
    """
    nowhere = violation.position is None
    is_read = violation.code not in SPEAK_FIRST - {"N1"} and violation.site[0] != "grant"  # N1 follows from reads
    along = (
        violation.position or 0
        if violation.arrival is None
        else violation.arrival.turn(violation.pool.name, violation.arrived_as)
    )
    if violation.code == "N1":  # the first layer speaks, not those to which it has spread
        along += violation.layers[0] << POSITION_BITS if violation.layers else 0
    where = nowhere != violation.is_unhooked, along, RANK[violation.code], violation.pool.pool_id
    return not violation.is_unhooked, violation.code != "L1", is_read, violation.code == "T1", *where


def _related(violations: Sequence[Violation]) -> Iterator[tuple[int, int]]:
    """Pairs of violations, by number, that belong to one incident."""
    groups: dict[tuple[object, ...], list[int]] = {}
    spread = {violation.request_id: violation.step for violation in violations if violation.code == "N1"}
    for number, violation in enumerate(violations):
        if not violation.code.startswith("H") and (violation.code not in ("L1", "X1", "X2") or violation.slot >= 0):
            groups.setdefault(("slot", *violation.place), []).append(number)
            whose = violation.pool.pool_id if violation.state is not None else None  # whose entries are no pages
            groups.setdefault(("page", whose, violation.page, violation.step), []).append(number)
        if violation.code in ("N1", "R9") and violation.request_id in spread:  # of one step, and what it came from
            groups.setdefault(("N1", spread[violation.request_id]), []).append(number)
        if violation.along is not None:
            groups.setdefault(("along", *violation.along), []).append(number)
        if violation.arrival is not None:
            groups.setdefault(("arrival", id(violation.arrival)), []).append(number)
        if violation.position is not None and violation.request_id is not None:
            groups.setdefault(("row", *violation.row), []).append(number)
        if violation.request_id is not None:
            groups.setdefault(("request", violation.request_id), []).append(number)
    for (what, *_), group in groups.items():
        if what == "row":
            yield from _related_in_row(violations, group)
        elif what == "request":
            wrong_rows = [number for number in group if violations[number].code == "R6"]
            yield from ((wrong_rows[0], number) for number in group if wrong_rows)
        else:
            yield from pairwise(group)
    yield from _related_to_unhooked(violations)


def _related_to_unhooked(violations: Sequence[Violation]) -> Iterator[tuple[int, int]]:
    """Forwards of one step that ran without hooks, and what is found in their rows."""
    steps: dict[int, int] = {}
    rows: dict[tuple[int, str | None], int] = {}
    for number, violation in enumerate(violations):
        if violation.is_unhooked:
            yield steps.setdefault(violation.step, number), number
            rows |= dict.fromkeys(violation.rows, number)
    for number, violation in enumerate(violations if rows else ()):
        if violation.code in FOLLOWING and violation.row in rows:
            yield rows[violation.row], number


def _related_in_row(violations: Sequence[Violation], row: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbours, and entries that hold each other's positions."""
    reached: list[tuple[int, int, int]] = []  # stretches without a gap: first and last position, one violation in it
    for number in sorted(row, key=lambda number: violations[number].position or 0):
        start, end = _span(violations[number])
        if reached and start <= reached[-1][1] + 1:
            first, last, member = reached[-1]
            reached[-1] = first, max(last, end), member
            yield member, number
        else:
            reached.append((start, end, number))
    for number in row:
        pointed = violations[number].found_position
        place = bisect_right(reached, pointed, key=itemgetter(0)) - 1 if pointed is not None else -1
        if pointed is not None and place >= 0 and pointed <= reached[place][1]:
            yield number, reached[place][2]


def _span(violation: Violation) -> tuple[int, int]:
    start = violation.position or 0
    return start, start if violation.until is None else violation.until


def _root(parents: list[int], number: int) -> int:
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = parents[number]
    return number


def _without_repeats(violations: Sequence[Violation]) -> list[Violation]:
    """Branches, substeps and requests that read the same damaged slot say it once."""
    first: dict[tuple[object, ...], Violation] = {}
    for violation in violations:
        message = first.setdefault((violation.code, *violation.place), violation)
        if violation.request_id is not None and violation.request_id not in (message.request_id, *message.others):
            message.others += (violation.request_id,)
    return list(first.values())
