"""Hits: single checks that fired, and how they are joined so that one fault is one incident."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcanary.codes import RANK
from kvcanary.forward import Forward
from kvcanary.state import PoolState


@dataclass(slots=True, eq=False)
class Hit:
    """One check that fired at one place.

    slot:      as the plan named it; outside the pool for R1 and W1
    position:  where the entry stands in its row
    request_id: whose row it is
    site:      substep kind and index of the forward that read or wrote, or of the canary's own look
    layers:    layers that differ; empty where that says nothing
    last_good: step in which this was last known good
    parent_position: for W5, the position of the parent
    found_position:  for R4, the position that the record has
    row_slots: for R6, the slots of the row
    fingerprint_hit: for R3, lane a disagrees but lane b over all layers is right
    expected, found: what the report should say, where the code alone does not tell it
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
    parent_position: int | None = None
    found_position: int | None = None
    row_slots: tuple[int, ...] = ()
    fingerprint_hit: bool = False
    expected: dict[str, Any] | None = None
    found: dict[str, Any] | None = None

    @property
    def page(self) -> int:
        return self.slot // self.pool.view.page_size

    @property
    def place(self) -> tuple[int, int]:
        return self.pool.pool_id, self.slot


def entry_hit(code: str, forward: Forward, entry: int, **evidence: Any) -> Hit:
    """A hit at one entry of a forward's write plan, at the slot that the plan named."""
    slot = forward.refused.get(entry, forward.write_slots[entry])
    request_id = forward.request_of(forward.row_of_entry(entry)).request_id
    position = int(forward.positions[entry])
    return Hit(code, forward.pool, slot, position, request_id, forward.site, forward.step, **evidence)


def join_hits(hits: Sequence[Hit]) -> list[list[Hit]]:
    """Incidents, the hit that speaks first; the others are its evidence.

    Hits are one incident when they share the slot; the page and the step; when their entries are neighbours in one
    row (what follows a wrong entry breaks too); when a wrong position points at another of them (an exchange); or
    when one is R6 and the other lies in the same row.
    """
    parents = list(range(len(hits)))
    for group in _related(hits):
        for member in group[1:]:
            parents[_root(parents, member)] = _root(parents, group[0])
    incidents: dict[int, list[Hit]] = {}
    for number, hit in enumerate(hits):
        incidents.setdefault(_root(parents, number), []).append(hit)
    joined = [_without_repeats(sorted(incident, key=_speaks_first)) for incident in incidents.values()]
    return sorted(joined, key=lambda incident: _speaks_first(incident[0]))


def _speaks_first(hit: Hit) -> tuple[bool, bool, int, int, int]:
    """Writes before reads; then along the row; at one slot by rank; the first pool before the second."""
    nowhere = hit.position is None
    return not hit.code.startswith("W"), nowhere, hit.position or 0, RANK[hit.code], hit.pool.pool_id


def _related(hits: Sequence[Hit]) -> Iterable[list[int]]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, hit in enumerate(hits):
        groups.setdefault(("slot", *hit.place), []).append(number)
        groups.setdefault(("page", hit.page, hit.step), []).append(number)
        if hit.code == "R6":
            groups.setdefault(("row", hit.request_id), []).append(number)
        if hit.request_id is not None and hit.position is not None:
            groups.setdefault(("entry", hit.pool.pool_id, hit.request_id, hit.position), []).append(number)
    yield from list(groups.values())
    for number, hit in enumerate(hits):
        row = hit.pool.pool_id, hit.request_id
        if hit.position is not None:
            yield [number, *groups.get(("entry", *row, hit.position - 1), ())]
        if hit.found_position is not None:
            yield [number, *groups.get(("entry", *row, hit.found_position), ())]
        yield [number, *groups.get(("row", hit.request_id), ())]


def _root(parents: list[int], number: int) -> int:
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = parents[number]
    return number


def _without_repeats(hits: Sequence[Hit]) -> list[Hit]:
    """Branches and substeps that read the same damaged slot say it once."""
    first: dict[tuple[object, ...], Hit] = {}
    for hit in hits:
        first.setdefault((hit.code, *hit.place), hit)
    return list(first.values())
