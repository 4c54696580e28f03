"""From hits to findings: what the record says, what was expected, who wrote it, who reads it, whose bytes it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvcanary.calls.violation import NO_SLOT, Hit, fair_share, join_hits
from kvcanary.calls.violation_log import HitGroup
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.page_history import PageEvent
from kvcanary.pools.launch_site import site_name
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
from kvcanary.records.state import CanaryState
from kvcanary.report.causes.ranking import rank_causes
from kvcanary.report.evidence import Evidence, expected_and_found, tokens_of
from kvcanary.report.finding import Finding
from kvcanary_kernels.record import layout as record

EVIDENCE_LINES = 6
MOST_DESCRIBED = 64  # incidents of one check that become findings; the others are counted
MOST_LOCATED = 32  # of these, those in which the one changed word is looked for
MOST_SEARCHED = 4  # and those of whose bytes it is asked whose they are
_CONTENT = frozenset({"R9", "R12", "P1", "T1"})
_OF_GRANTS = frozenset({"R7", "R8"})
_TOUCHES_ALL = frozenset({"W3", *_CONTENT})  # who has the page reads what lies there
_UNDECLARED = frozenset({"R3", "R9", "P1", "T1"})


class Described(NamedTuple):
    """`untold`: incidents that are only counted, since there were too many."""

    findings: list[Finding]
    untold: int


class Describer:
    """Makes findings; runs only when something fired. `show_tokens`: token ids may appear in them."""

    def __init__(self, state: CanaryState, ledger: Ledger, show_tokens: bool = False) -> None:
        self._state, self._ledger, self._show_tokens = state, ledger, show_tokens

    def describe(
        self, groups: Sequence[HitGroup], number_of: Callable[[Sequence[Hit]], int], action: str = ""
    ) -> Described:
        """Join what an intake kept, and describe its incidents; `number_of` gives an incident its number."""
        incidents = join_hits([hit for group in groups for hit in group.kept])
        told = fair_share(incidents, MOST_DESCRIBED)
        findings = [
            self.finding(incident, number_of(incident), action, place < MOST_LOCATED, place < MOST_SEARCHED)
            for place, incident in enumerate(told)
        ]
        return Described(findings, len(incidents) - len(told))

    def finding(
        self, incident: Sequence[Hit], number: int, action: str = "", locate: bool = True, search: bool = True
    ) -> Finding:
        """The finding of one incident; `locate`: name the one changed word; `search`: else whose bytes these are."""
        facts = self._facts(incident, locate, search)
        hit, word = facts.hit, facts.word
        writes = hit.code.startswith("W")
        expected, seen = expected_and_found(facts)
        if self._show_tokens:
            wanted, token = tokens_of(facts)
            expected, seen = expected | wanted, seen | token
        readers = self._readers(incident, facts.owner)
        return Finding(
            code=hit.code,
            name=hit.meaning.name,
            sentence=hit.sentence,
            pool=hit.pool.name,
            page=hit.page,
            slot=hit.slot,
            offset=hit.slot % self._state.page_size,
            position=hit.position,
            layer=hit.layers[0] if hit.layers else None,
            layers=hit.layers,
            part=word.part if word else None,
            head=word.head if word else None,
            dim=word.dim if word else None,
            byte=word.byte if word else None,
            bit=word.bit if word else None,
            site=hit.site,
            step=hit.step,
            reader=None if writes else hit.request_id,
            writer=hit.request_id if writes else facts.writer,
            write_step=hit.step if writes else facts.write_step,
            write_site=hit.site if writes else facts.write_site,
            undeclared=_is_undeclared(facts),
            owner=facts.owner,
            expected=expected,
            found=seen,
            bytes_of=facts.whose,
            last_good_step=hit.last_good,
            first_bad_step=hit.step,
            history=tuple(_told(event) for event in facts.events if event.kind != "committed"),
            readers=tuple(request.request_id for request in readers),
            exposed_tokens=sum(r.tokens_since(hit.last_good) for r in readers if hit.last_good is not None),
            causes=rank_causes(facts),
            evidence=_evidence(
                [other for other in incident[1:] if hit.arrival is None or other.arrival is not hit.arrival]
            ),
            incident=number,
            action=action,
        )

    def _facts(self, incident: Sequence[Hit], locate: bool, search: bool) -> Evidence:
        hit, ledger = incident[0], self._ledger
        reader = ledger.requests.get(hit.request_id or "")
        if not 0 <= hit.slot < hit.pool.view.num_slots:
            return Evidence(incident, ledger, reader=reader)
        found = record.read_record(hit.pool.records, hit.slot)
        word = _changed_word(hit) if locate else None
        whose = self._whose(hit, reader) if search and word is None else ()
        named = whose[0].slot if whose else None
        return Evidence(
            incident,
            ledger,
            found,
            writer=ledger.name(found.request) if found.site else None,
            word=word,
            whose=whose,
            source=None if named is None else record.read_record(hit.pool.records, named),
            source_is_damaged=named is not None and not holds_its_own(hit.pool, hit.layers[0], named),
            owner=ledger.owner_of(hit.page),
            holders=ledger.holders(hit.page) if hit.code in _OF_GRANTS else (),
            is_shared=int(ledger.states[hit.page]) == record.SHARED,
            granted=int(ledger.generations[hit.page]),
            events=tuple(ledger.history.of(hit.page)),
            finite_since=ledger.pages.finite_since(hit.page),
            reader=reader,
        )

    def _whose(self, hit: Hit, reader: Request | None) -> tuple[Provenance, ...]:
        """Where bytes are at stake and no single word explains them."""
        if hit.code not in _CONTENT or not hit.layers or hit.fingerprint_hit:
            return ()
        end = 0 if reader is None else min(len(reader.pages) * self._state.page_size, SEARCHED_SLOTS)
        names = [] if reader is None else self._ledger.slots(reader, 0, end)
        row = [slot for slot in slots_in(hit.pool.view, np.array(names, np.int64)).tolist() if slot >= 0]
        hypotheses = UNWRITTEN_HYPOTHESES if hit.is_unwritten else HYPOTHESES
        return whose_bytes(hit.pool, hit.slot, hit.layers[0], first=row, hypotheses=hypotheses)

    def _readers(self, incident: Sequence[Hit], owner: str | None) -> list[Request]:
        """Live requests whose rows the incident touches, and all who have its page where that is damaged or shared."""
        names = [name for hit in incident for name in (hit.request_id, *hit.others)]
        if incident[0].code in _TOUCHES_ALL:
            names += self._ledger.holders(incident[0].page)
        known = dict.fromkeys(name for name in (*names, owner) if name is not None)
        return [self._ledger.requests[name] for name in known if name in self._ledger.requests]


def _is_undeclared(facts: Evidence) -> bool:
    """Whether other bytes lie there than the last declared write has left: a check of the bytes says so, or they do."""
    if facts.record is None or facts.hit.arrival is not None:
        return False
    return facts.hit.code in _UNDECLARED or (facts.hit.code in ("R4", "R5", "R6") and not facts.holds_its_own)


def _changed_word(hit: Hit) -> ChangedWord | None:
    if hit.arrival is not None:
        return hit.arrival.words.get((hit.pool.pool_id, hit.slot))
    is_one = hit.code == "R9" and len(hit.layers) == 1 and not hit.is_unwritten
    return locate_word(hit.pool, hit.slot, hit.layers[0]) if is_one else None


def _told(event: PageEvent) -> str:
    """`granted to 'req-0' at step 1 (engine.py:88)`: with the line outside this package that asked for it."""
    return f"{event} ({event.place})" if event.site else str(event)


def _evidence(hits: Sequence[Hit]) -> tuple[str, ...]:
    lines = [f"{hit.code} {hit.meaning.name}: {_place(hit)}{site_name(*hit.site)}" for hit in hits[:EVIDENCE_LINES]]
    if len(hits) > EVIDENCE_LINES:
        lines.append(f"and {len(hits) - EVIDENCE_LINES} more checks of the same fault")
    return tuple(lines)


def _place(hit: Hit) -> str:
    if hit.slot == NO_SLOT and hit.code == "H1":
        return f"{hit.pool.name} pool, "
    position = "" if hit.position is None else f", position {hit.position}"
    return f"{hit.pool.name} slot {hit.slot}{position}, seen by "
