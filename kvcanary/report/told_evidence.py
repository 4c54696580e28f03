"""Told evidence: what is read about an incident in pools whose grants, frees and requests an engine has told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvcanary.calls.violation import Hit
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.slot_maps import slots_in
from kvcanary.provenance.bytes_of import (
    HYPOTHESES,
    SEARCHED_SLOTS,
    UNWRITTEN_HYPOTHESES,
    Provenance,
    holds_its_own,
    whose_bytes,
)
from kvcanary.provenance.changed_word import ChangedWord, locate_word
from kvcanary.report.evidence import Evidence
from kvcanary_kernels.record import layout as record

MOST_LOCATED = 32  # incidents of one check in which the one changed word is looked for
MOST_SEARCHED = 4  # and those of whose bytes it is asked whose they are
_CONTENT = frozenset({"R9", "R12", "P1", "T1"})
_OF_GRANTS = frozenset({"R7", "R8"})
_TOUCHES_ALL = frozenset({"W3", *_CONTENT})  # who has the page reads what lies there


class ToldEvidence:
    """Reads records, bytes and the ledger, as they are when an incident is described."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def read(self, incident: Sequence[Hit], place: int = 0) -> Evidence:
        """`place`: of the incident among those of its check; less is looked for in later ones."""
        hit, ledger = incident[0], self._ledger
        is_inside = 0 <= hit.slot < hit.pool.view.num_slots
        owner, reader = ledger.owner_of(hit.page) if is_inside else None, ledger.requests.get(hit.request_id or "")
        touched, good = self._touched(incident, owner), hit.last_good
        facts = Evidence(
            incident,
            ledger,
            owner=owner,
            reader=reader,
            readers=tuple(request.request_id for request in touched),
            exposed_tokens=0 if good is None else sum(request.tokens_since(good) for request in touched),
        )
        return replace(facts, **self._of_slot(hit, reader, place)) if is_inside else facts

    def _of_slot(self, hit: Hit, reader: Request | None, place: int) -> dict[str, Any]:
        """What its record, its bytes and its page say."""
        ledger, found = self._ledger, record.read_record(hit.pool.records, hit.slot)
        word = _changed_word(hit) if place < MOST_LOCATED else None
        whose = self._whose(hit, reader) if place < MOST_SEARCHED and word is None else ()
        named, events = whose[0].slot if whose else None, tuple(ledger.history.of(hit.page))
        return {
            "record": found,
            "writer": ledger.name(found.request) if found.site else None,
            "word": word,
            "whose": whose,
            "source": None if named is None else record.read_record(hit.pool.records, named),
            "source_is_damaged": named is not None and not holds_its_own(hit.pool, hit.layers[0], named),
            "holders": ledger.holders(hit.page) if hit.code in _OF_GRANTS else (),
            "is_shared": int(ledger.states[hit.page]) == record.SHARED,
            "granted": int(ledger.generations[hit.page]),
            "events": events,
            "history": tuple(_told(event) for event in events if event.kind != "committed"),
            "finite_since": ledger.pages.finite_since(hit.page),
        }

    def _whose(self, hit: Hit, reader: Request | None) -> tuple[Provenance, ...]:
        """Where bytes are at stake and no single word explains them."""
        if hit.code not in _CONTENT or not hit.layers or hit.fingerprint_hit:
            return ()
        end = 0 if reader is None else min(len(reader.pages) * hit.pool.view.page_size, SEARCHED_SLOTS)
        names = [] if reader is None else self._ledger.slots(reader, 0, end)
        row = [slot for slot in slots_in(hit.pool.view, np.array(names, np.int64)).tolist() if slot >= 0]
        hypotheses = UNWRITTEN_HYPOTHESES if hit.is_unwritten else HYPOTHESES
        return whose_bytes(hit.pool, hit.slot, hit.layers[0], first=row, hypotheses=hypotheses)

    def _touched(self, incident: Sequence[Hit], owner: str | None) -> list[Request]:
        """Live requests whose rows the incident touches, and all who have its page where that is damaged or shared."""
        names = [name for hit in incident for name in (hit.request_id, *hit.others)]
        if incident[0].code in _TOUCHES_ALL:
            names += self._ledger.holders(incident[0].page)
        known = dict.fromkeys(name for name in (*names, owner) if name is not None)
        return [self._ledger.requests[name] for name in known if name in self._ledger.requests]


def _changed_word(hit: Hit) -> ChangedWord | None:
    if hit.arrival is not None:
        return hit.arrival.words.get((hit.pool.pool_id, hit.slot))
    is_one = hit.code == "R9" and len(hit.layers) == 1 and not hit.is_unwritten
    return locate_word(hit.pool, hit.slot, hit.layers[0]) if is_one else None


def _told(event: PageEvent) -> str:
    """`granted to 'req-0' at step 1 (engine.py:88)`: with the line outside this package that asked for it."""
    return f"{event} ({event.place})" if event.site else str(event)
