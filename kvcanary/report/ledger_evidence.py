"""Told evidence: what is read about an incident in pools whose grants, frees and requests an engine has told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvcanary.calls.violation import Violation
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.slot_maps import slots_in
from kvcanary.provenance.bytes_of import (
    HYPOTHESES,
    SEARCHED_SLOTS,
    UNWRITTEN_HYPOTHESES,
    Provenance,
    find_provenance,
    holds_its_own,
)
from kvcanary.provenance.changed_word import ChangedWord, locate_word
from kvcanary.report.evidence import Evidence
from kvcanary.report.state_evidence import of_state
from kvcanary_kernels.record import layout as record

MOST_LOCATED = 32  # incidents of one check in which the one changed word is looked for
MOST_SEARCHED = 4  # and those of whose bytes it is asked whose they are
_CONTENT = frozenset({"R9", "R12", "P1", "T1"})
_OF_GRANTS = frozenset({"R7", "R8"})
_TOUCHES_ALL = frozenset({"W3", *_CONTENT})  # who has the page reads what lies there


class LedgerEvidence:
    """Reads records, bytes and the ledger, as they are when an incident is described."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def read(self, incident: Sequence[Violation], place: int = 0) -> Evidence:
        """`place`: of the incident among those of its check; less is looked for in later ones."""
        violation, ledger = incident[0], self._ledger
        if violation.state is not None:
            return of_state(incident, violation.state, ledger)
        is_inside = 0 <= violation.slot < violation.pool.view.num_slots
        owner = ledger.owner_of(violation.page) if is_inside else None
        reader = ledger.requests.get(violation.request_id or "")
        touched, good = self._touched(incident, owner), violation.last_good
        facts = Evidence(
            incident,
            ledger,
            owner=owner,
            reader=reader,
            readers=tuple(request.request_id for request in touched),
            exposed_tokens=0 if good is None else sum(request.tokens_since(good) for request in touched),
        )
        return replace(facts, **self._of_slot(violation, reader, place)) if is_inside else facts

    def _of_slot(self, violation: Violation, reader: Request | None, place: int) -> dict[str, Any]:
        """What its record, its bytes and its page say."""
        ledger, found = self._ledger, record.read_record(violation.pool.records, violation.slot)
        word = _changed_word(violation) if place < MOST_LOCATED else None
        provenance = self._whose(violation, reader) if place < MOST_SEARCHED and word is None else ()
        named, events = provenance[0].slot if provenance else None, tuple(ledger.history.of(violation.page))
        return {
            "record": found,
            "writer": ledger.name(found.request) if found.site else None,
            "word": word,
            "provenance": provenance,
            "source": None if named is None else record.read_record(violation.pool.records, named),
            "source_is_damaged": named is not None and not holds_its_own(violation.pool, violation.layers[0], named),
            "holders": ledger.holders(violation.page) if violation.code in _OF_GRANTS else (),
            "is_shared": int(ledger.states[violation.page]) == record.SHARED,
            "granted": int(ledger.generations[violation.page]),
            "events": events,
            "history": tuple(_reported(event) for event in events if event.kind != "committed"),
            "finite_since": ledger.pages.finite_since(violation.page),
        }

    def _whose(self, violation: Violation, reader: Request | None) -> tuple[Provenance, ...]:
        """Where bytes are at stake and no single word explains them."""
        if violation.code not in _CONTENT or not violation.layers or violation.fingerprint_violation:
            return ()
        view, names = violation.pool.view, np.empty(0, np.int64)
        if reader is not None:
            names = np.array(self._ledger.slots(reader, 0, min(len(reader.pages) * view.page_size, SEARCHED_SLOTS)))
        row = [slot for slot in slots_in(view, names).tolist() if slot >= 0]
        hypotheses = UNWRITTEN_HYPOTHESES if violation.is_unwritten else HYPOTHESES
        return find_provenance(violation.pool, violation.slot, violation.layers[0], first=row, hypotheses=hypotheses)

    def _touched(self, incident: Sequence[Violation], owner: str | None) -> list[Request]:
        """Live requests whose rows the incident touches, and all who have its page where that is damaged or shared."""
        names = [name for violation in incident for name in (violation.request_id, *violation.others)]
        if incident[0].code in _TOUCHES_ALL:
            names += self._ledger.holders(incident[0].page)
        known = dict.fromkeys(name for name in (*names, owner) if name is not None)
        return [self._ledger.requests[name] for name in known if name in self._ledger.requests]


def _changed_word(violation: Violation) -> ChangedWord | None:
    if violation.arrival is not None:
        return violation.arrival.words.get((violation.pool.pool_id, violation.slot))
    is_one = violation.code == "R9" and len(violation.layers) == 1 and not violation.is_unwritten
    return locate_word(violation.pool, violation.slot, violation.layers[0]) if is_one else None


def _reported(event: PageEvent) -> str:
    """`granted to 'req-0' at step 1 (engine.py:88)`: with the line outside this package that asked for it."""
    return f"{event} ({event.place})" if event.site else str(event)
