"""Evidence: what was read about an incident before it is described, and what its check expected and found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from kvcanary.calls.violation import NO_BRANCH, Violation
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.launch_site import site_name, unpack_site
from kvcanary.pools.slot_maps import slots_in
from kvcanary.pools.views import PoolView
from kvcanary.provenance.bytes_of import Provenance, holds_its_own
from kvcanary.provenance.changed_word import ChangedWord
from kvcanary.provenance.not_finite import describe_elements
from kvcanary.report.arrival_text import expected_of, found_of
from kvcanary.report.row_evidence import RowEvidence
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import MASK_32, MASK_64, Identity, Record, chain_host

Values = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything that was read about the first violation of an incident; the finding and its causes are made from it.

    Every kind of pool gives one, and leaves out what it does not know: rules name no cause then.

    declared:    what the engine has told of pages and requests, None where it tells nobody
    record:  of the slot, None where the slot is outside the pool, or a cache has no records
    writer:  request that the record names, where its name is still known
    word:    the one word that changed, where the two fingerprints name one
    provenance:   whose bytes lie there now
    source:  record of the slot whose bytes these are; source_is_damaged: that slot does not hold its own
    owner:   request that the page is granted to;  holders: those whose rows name it, for R7 and R8
    is_shared: rows or a prefix cache may read the page, and nobody may write it
    granted: generation of the page
    events:  grants and frees of the page, oldest first
    finite_since: step in which what lay in the page when it was granted was found finite; None: nobody has looked
    reader:  request whose row it is, while it lives
    history: what the finding says of the page;  readers: requests whose rows are touched
    exposed_tokens: of theirs, sampled since it was last good
    """

    incident: Sequence[Violation]
    declared: Ledger | None
    record: Record | None = None
    writer: str | None = None
    word: ChangedWord | None = None
    provenance: tuple[Provenance, ...] = ()
    source: Record | None = None
    source_is_damaged: bool = False
    owner: str | None = None
    holders: tuple[str, ...] = ()
    is_shared: bool = False
    granted: int | None = None
    events: tuple[PageEvent, ...] = ()
    finite_since: int | None = None
    reader: Request | None = None
    history: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    exposed_tokens: int = 0

    @property
    def ledger(self) -> Ledger:
        """Asked where it is known whose row it is: never in pools of which nobody tells."""
        return cast("Ledger", self.declared)

    @property
    def violation(self) -> Violation:
        return self.incident[0]

    @cached_property
    def row(self) -> RowEvidence:
        """What the records of the row say; for incidents that have a slot."""
        return RowEvidence(self.incident, self.declared, self.reader)

    @property
    def write_site(self) -> tuple[str, int] | None:
        """Kind and index of the last declared write; None where nobody has written."""
        return unpack_site(self.record.site)[:2] if self.record is not None and self.record.site else None

    @property
    def write_step(self) -> int | None:
        return self.record.step if self.record is not None and self.record.site else None

    @property
    def last_write(self) -> str:
        """`verify, step 7`: the last declared write."""
        return "nobody" if self.write_site is None else f"{site_name(*self.write_site)}, step {self.write_step}"

    @property
    def was_never_right(self) -> bool:
        """Whether nobody has seen the bytes right since they were written."""
        return self.violation.last_good in (None, self.write_step)

    @property
    def is_own_write(self) -> bool:
        """Whether the forward that found it is the one that wrote there last."""
        return (self.violation.site, self.violation.step) == (self.write_site, self.write_step)

    @property
    def is_first_read(self) -> bool:
        """Whether that is so, and nothing ran in between.

        A forward is judged before the tokens of its step leave; extend runs behind that, and waits for the next step.
        """
        return self.is_own_write and self.violation.site[0] != "extend"

    @property
    def is_final(self) -> bool:
        """Whether the position is one of which the reader's token is final."""
        position = self.violation.position
        return self.reader is not None and position is not None and position < self.reader.committed_len

    @cached_property
    def granted_slot(self) -> int | None:
        """The slot that the reader was granted for this position; None where it was granted none."""
        return None if self.violation.position is None else self.slot_of(self.violation.position)

    @property
    def held_by(self) -> str:
        """Who has the page, in words."""
        names = (self.owner,) if self.owner is not None else self.holders
        return " and ".join(map(repr, names[:2])) + (" and others" if names[2:] else "") or "a prefix cache"

    @property
    def is_own_place(self) -> bool:
        """Whether the row looks where it should: what is wrong is what lies there."""
        return self.granted_slot == self.violation.slot

    @property
    def own_position(self) -> int | None:
        """The position of the row for which this slot was granted to the request; None where it was not."""
        if self.reader is None or self.violation.page not in self.reader.pages:
            return None
        size = self.violation.pool.view.page_size
        slot = self.violation.slot if self.violation.named is None else self.violation.named
        return self.reader.pages.index(self.violation.page) * size + slot % size

    def slot_of(self, position: int) -> int | None:
        if self.reader is None or not 0 <= position < len(self.reader.pages) * self.violation.pool.view.page_size:
            return None
        name = np.array([self.ledger.slot(self.reader, position)])
        return int(slots_in(self.violation.pool.view, name)[0])

    @cached_property
    def different_record(self) -> Record | None:
        """Of the first entry of the row that holds another token (R6), where that lies in the row's own place."""
        if self.first_difference is None:
            return None
        slot = self.slot_of(self.first_difference)
        begin = (self.violation.position or 0) + 1 - len(self.violation.row_slots)
        if slot is None or slot != int(self.violation.row_slots[self.first_difference - begin]):
            return None
        return record.read_record(self.violation.pool.records, slot)

    @cached_property
    def written_as(self) -> Identity | None:
        """Under which the row's own tokens give the chain that was found; None where that is no other that is known."""
        reader, found, pool = self.reader, self.record, self.violation.pool
        if reader is None or found is None or self.declared is None or found.position != self.violation.position:
            return None
        truth = self.declared.truth(reader, pool.pool_id, found.position + 1)
        if truth is None:
            return None
        inverse = pow(pool.keys.inverse, found.position + 1, 1 << 64)  # a chain is linear in its root
        root = (reader.root(pool.pool_id) + (found.chain - truth) * inverse) & MASK_64
        known = self.declared.book.roots.items()
        return next((one for one, roots in known if roots[pool.pool_id] == root and one != reader.identity), None)

    @cached_property
    def holds_its_own(self) -> bool:
        """Whether the bytes of the entry that lies wrong are those that its record names; never where R9 says so."""
        slot: int | None = self.violation.slot if self.violation.code in ("R4", "R5") else None
        if self.violation.code == "R6" and self.first_difference is not None:
            slot = self.slot_of(self.first_difference)
        if slot is None:
            return self.violation.code != "R9"
        pool = self.violation.pool
        return all(holds_its_own(pool, layer, slot) for layer in range(pool.view.num_layers))

    @cached_property
    def first_difference(self) -> int | None:
        """First position at which the row that was read (R6) holds another token than the request has."""
        if self.reader is None or not len(self.violation.row_slots):
            return None
        pool, offset = self.violation.pool, self.violation.pool.view.token_offset
        slots = torch.tensor(self.violation.row_slots, device=pool.records.device)
        held = (pool.records[slots, record.TOKEN_POSITION] & MASK_32).cpu()
        begin = (self.violation.position or 0) + 1 - len(slots)  # a window may hide what lies before
        tokens = self.reader.tokens[begin + offset : begin + offset + len(slots)]
        wanted = torch.tensor(tokens, dtype=torch.int64) & MASK_32
        differs = (held[: len(wanted)] != wanted).nonzero().flatten()
        return begin + int(differs[0]) if len(differs) else None

    def provenance_of(self, *kinds: str) -> Provenance | None:
        """The best answer of one of these kinds."""
        return next((answer for answer in self.provenance if answer.kind in kinds), None)


def expected_and_found(facts: Evidence) -> tuple[Values, Values]:
    """Both sides of the check that leads, as it told them or as its code says; empty where there are none.

    They are read when the finding is described. Where what the check looks at is as it should be by then, what they
    show is who has written there since, if somebody tells of writes.
    """
    expected, found = _both_sides(facts)
    if expected and facts.declared is not None and all(found.get(name) == value for name, value in expected.items()):
        before = f"before {site_name(*facts.violation.site)}, step {facts.violation.step}"
        return {"last_write": before}, found | {"last_write": facts.last_write}
    return expected, found


def _both_sides(facts: Evidence) -> tuple[Values, Values]:
    violation = facts.violation
    expected, found = _content(facts) if facts.word is not None else ({}, {})
    if violation.expected is not None:
        return violation.expected | expected, (violation.found or {}) | found
    if violation.arrival is not None:
        place = violation.arrived_as
        return expected | expected_of(violation.arrival, place), found | found_of(violation.arrival, place)
    if violation.code == "N1":
        return {"elements": "finite"}, _not_finite(violation)
    if violation.is_unwritten:
        return {"elements": "finite"}, {"layers_not_finite": list(violation.layers)}
    sides = next((sides for codes, sides in _SIDES if facts.violation.code in codes.split()), None)
    return sides(facts) if sides in _NEED_NO_RECORD or (sides and facts.record is not None) else ({}, {})


def _not_finite(violation: Violation) -> Values:
    """What lies there now, in the first of the layers."""
    view, found = violation.pool.view, {"layers_not_finite": list(violation.layers)}
    if not isinstance(view, PoolView) or not violation.layers or not 0 <= violation.slot < view.num_slots:
        return found
    said = describe_elements(view, violation.layers[0], violation.slot)
    return {"elements": said or "finite by now"} | found


def tokens_of(facts: Evidence) -> tuple[Values, Values]:
    """The request's token at this place and the record's; only for those who asked to see tokens."""
    violation, reader = facts.violation, facts.reader
    found = {} if facts.record is None or not facts.record.site else {"token": facts.record.token}
    if reader is None or violation.position is None:
        return {}, found
    place = violation.position + violation.pool.view.token_offset
    return {"token": int(reader.tokens[place])} if place < len(reader.tokens) else {}, found


def _slot(facts: Evidence) -> tuple[Values, Values]:
    """The slot, and where a slot map led to it the slot of the full group."""
    violation, view = facts.violation, facts.violation.pool.view
    right = f"{view.null_slots} or more" if violation.code == "R2" else f"0 to {view.num_slots - 1}"
    named = {} if violation.named is None else {"slot_map_of": violation.named}
    return {"slot": right}, {"slot": violation.slot} | named


def _one_write(facts: Evidence) -> tuple[Values, Values]:
    return {"writes_in_forward": 1}, {"writes_in_forward": 2, "layers": list(facts.violation.layers)}


def _after_parent(facts: Evidence) -> tuple[Values, Values]:
    parent = facts.violation.parent_position
    return {"position": None if parent is None else parent + 1}, {"position": facts.violation.position}


def _seal(facts: Evidence) -> tuple[Values, Values]:
    violation, found = facts.violation, _record(facts)
    if violation.fingerprint_violation:
        fingerprint_b = {"lane_b": _hex(found.content_b)}
        return fingerprint_b | {"lane_a": "agrees"}, fingerprint_b | {"lane_a": "differs"}
    seal = record.seal_host(found, violation.slot, violation.pool.pool_id, violation.pool.keys)
    return {"seal": _hex(seal)}, {"seal": _hex(found.seal)}


def _owner(facts: Evidence) -> tuple[Values, Values]:
    return {"owner": facts.violation.request_id}, {"owner": facts.owner, "generation": facts.granted}


def _page(facts: Evidence) -> tuple[Values, Values]:
    """As `_owner`; of a page that has none, but holders, with what the row was granted for this position."""
    expected, found = _owner(facts)
    if not facts.is_shared:
        return expected, found
    granted = -1 if facts.granted_slot is None else facts.granted_slot
    page = granted // facts.violation.pool.view.page_size if granted >= 0 else None
    return expected | {"page": page}, found | {"page": facts.violation.page, "held_by": facts.held_by}


def _position(facts: Evidence) -> tuple[Values, Values]:
    found = _record(facts)
    return {"position": facts.violation.position}, {"position": found.position, "chain": _hex(found.chain)}


def _chain(facts: Evidence) -> tuple[Values, Values]:
    found = _record(facts)
    if facts.violation.lineage is not None:
        _, parent, other = facts.violation.lineage
        before = site_name(facts.violation.site[0], facts.violation.site[1] - 1)
        read = "none" if other == NO_BRANCH else other
        return {"branch": f"{parent} of {before}"}, {"branch": f"{read} of {before}", "chain": _hex(found.chain)}
    expected = _continued_chain(facts, found)
    # A branch continues another slot than the one that was granted before it.
    return {"chain": None if expected == found.chain else _hex(expected)}, {"chain": _hex(found.chain)}


def _continued_chain(facts: Evidence, found: Record) -> int | None:
    """Chain that this token would have behind the entry that the row's owner was granted before it."""
    violation, reader = facts.violation, facts.reader
    if reader is None or violation.position is None:
        return None
    before = reader.root(violation.pool.pool_id)
    if violation.position:
        slot = facts.slot_of(violation.position - 1)
        if slot is None or slot < violation.pool.view.null_slots:
            return None
        before = record.read_record(violation.pool.records, slot).chain
    return chain_host([found.token], found.position, before, violation.pool.keys)[0]


def _truth(facts: Evidence) -> tuple[Values, Values]:
    violation, reader, found = facts.violation, facts.reader, _record(facts)
    if reader is None:
        return {}, {"chain": _hex(found.chain)}
    truth = facts.ledger.truth(reader, violation.pool.pool_id, (violation.position or 0) + 1)
    return {"chain": _hex(truth)}, {"chain": _hex(found.chain), "first_different_position": facts.first_difference}


def _step(facts: Evidence) -> tuple[Values, Values]:
    return {"written_by_step": facts.violation.step}, {"written_in_step": _record(facts).step}


def _grant(facts: Evidence) -> tuple[Values, Values]:
    found, every = _record(facts), facts.violation.pool.full_layers
    missing = [layer for layer in range(facts.violation.pool.view.num_layers) if not found.layers >> layer & 1]
    expected = {"generation": facts.granted, "layers": every.bit_count()}
    return expected, {"generation": found.generation, "layers": every.bit_count() - len(missing), "missing": missing}


def _content(facts: Evidence) -> tuple[Values, Values]:
    word, violation = facts.word, facts.violation
    if word is None:
        right = "poison" if violation.code == "P1" else "as written"
        return {"layers": right}, {"layers_changed": list(violation.layers)}
    digits = 2 * word.size
    expected = {"bits": f"0x{word.old:0{digits}x}", "value": _number(word.old_value)}
    return expected, {"bits": f"0x{word.new:0{digits}x}", "value": _number(word.new_value)}


#: By codes, both sides of what they check; what reads the record says nothing where there is none.
_SIDES: tuple[tuple[str, Callable[[Evidence], tuple[Values, Values]]], ...] = (
    ("R1 W1 R2", _slot),
    ("W4", _one_write),
    ("W5", _after_parent),
    ("R3", _seal),
    ("R4", _position),
    ("R5", _chain),
    ("R6", _truth),
    ("R7 R8", _page),
    ("W2 W3 W7", _owner),
    ("R9 T1 P1", _content),
    ("R11", _step),
    ("R12", _grant),
)
_NEED_NO_RECORD = (_slot, _one_write, _after_parent)


def _record(facts: Evidence) -> Record:
    """For sides that are asked only where there is one."""
    return cast("Record", facts.record)


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _hex(value: int | None) -> str | None:
    return None if value is None else f"0x{value:016x}"
