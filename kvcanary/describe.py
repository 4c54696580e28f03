"""From hits to a finding: what the record says, what was expected, who wrote it, who reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcanary.codes import CODES
from kvcanary.diagnosis import rank_causes
from kvcanary.findings import Finding
from kvcanary.hits import Hit
from kvcanary.lanes import lane_a_of_slots
from kvcanary.ledger import Ledger
from kvcanary.locate import ChangedWord, locate_word
from kvcanary.requests import Request
from kvcanary.sites import site_name, unpack_site
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels import record
from kvcanary_kernels.record import MASK_32, Record, chain_host

EVIDENCE_LINES = 6


@dataclass(frozen=True, eq=False)
class Facts:
    """Everything that was read about the first hit of an incident; causes are ranked from it.

    record:  of the slot, None where the slot is outside the pool
    word:    the one word that changed, where the two lanes name one
    same_as: slots whose bytes this layer holds now, by their fingerprints
    zeroed:  the layer's rows are all zero
    owner:   request that the page is granted to
    """

    incident: Sequence[Hit]
    record: Record | None
    word: ChangedWord | None
    same_as: tuple[int, ...]
    zeroed: bool
    owner: str | None
    granted: int | None

    @property
    def hit(self) -> Hit:
        return self.incident[0]


class Describer:
    """Makes findings; runs only when something fired."""

    def __init__(self, state: CanaryState, ledger: Ledger) -> None:
        self._state, self._ledger = state, ledger

    def finding(self, incident: Sequence[Hit], number: int) -> Finding:
        facts = self._facts(incident)
        hit, found = facts.hit, facts.record
        word, code = facts.word, CODES[hit.code]
        expected, seen = self._expected_and_found(facts)
        writes = hit.code.startswith("W")
        readers = self._readers(hit)
        return Finding(
            code=hit.code,
            name=code.name,
            sentence=code.sentence,
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
            writer=hit.request_id if writes else self._writer(found),
            write_step=hit.step if writes else _write_step(found),
            write_site=hit.site if writes else _write_site(found),
            expected=expected,
            found=seen,
            last_good_step=hit.last_good,
            history=self._history(hit.page),
            readers=tuple(request.request_id for request in readers),
            exposed_tokens=sum(r.tokens_since(hit.last_good) for r in readers if hit.last_good is not None),
            causes=rank_causes(facts),
            evidence=_evidence(incident[1:]),
            incident=number,
        )

    def _facts(self, incident: Sequence[Hit]) -> Facts:
        hit = incident[0]
        pool, inside = hit.pool, 0 <= hit.slot < hit.pool.view.num_slots
        owner = self._ledger.owner_of(hit.page) if inside else None
        found = record.read_record(pool.records, hit.slot) if inside else None
        word: ChangedWord | None = None
        same_as: tuple[int, ...] = ()
        zeroed = False
        if hit.code == "R9" and hit.layers:
            word = locate_word(pool, hit.slot, hit.layers[0]) if len(hit.layers) == 1 else None
            same_as, zeroed = _content_names(pool, hit.slot, hit.layers[0])
        granted = int(self._ledger.generations[hit.page]) if inside else None
        return Facts(incident, found, word, same_as, zeroed, owner, granted)

    def _expected_and_found(self, facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
        hit, found, pool = facts.hit, facts.record, facts.hit.pool
        if hit.expected is not None:
            return hit.expected, hit.found or {}
        match hit.code:
            case "R1" | "W1":
                return {"slot": f"0 to {pool.view.num_slots - 1}"}, {"slot": hit.slot}
            case "R2":
                return {"slot": f"{pool.view.null_slots} or more"}, {"slot": hit.slot}
            case "W4":
                return {"writes_in_forward": 1}, {"writes_in_forward": 2, "layers": list(hit.layers)}
            case "W5":
                parent = hit.parent_position
                return {"position": None if parent is None else parent + 1}, {"position": hit.position}
        if found is None:
            return {}, {}
        match hit.code:
            case "R3" if hit.fingerprint_hit:
                return {"lane_b": _hex(found.content_b)}, {"lane_b": _hex(found.content_b), "lane_a": "differs"}
            case "R3":
                seal = record.seal_host(found, hit.slot, pool.pool_id, pool.keys)
                return {"seal": _hex(seal)}, {"seal": _hex(found.seal)}
            case "R7" | "R8":
                return {"owner": hit.request_id}, {"owner": facts.owner, "generation": facts.granted}
            case "R4":
                return {"position": hit.position}, {"position": found.position, "chain": _hex(found.chain)}
            case "R5":
                return {"chain": _hex(self._continued_chain(hit, found))}, {"chain": _hex(found.chain)}
            case "R6":
                return self._truth(hit, found)
            case "R12":
                return _grant(facts, found)
            case "R9":
                return _content(facts)
        return {}, {}

    def _continued_chain(self, hit: Hit, found: Record) -> int | None:
        """Chain that this token would have behind the entry that the row's owner was granted before it."""
        request, position = self._ledger.requests.get(hit.request_id or ""), hit.position
        if request is None or position is None:
            return None
        before = request.root(hit.pool.pool_id)
        if position:
            slot = self._ledger.slot(request, position - 1)
            if slot < 0:
                return None
            before = record.read_record(hit.pool.records, slot).chain
        return chain_host([found.token], found.position, before, self._state.keys)[0]

    def _truth(self, hit: Hit, found: Record) -> tuple[dict[str, Any], dict[str, Any]]:
        request = self._ledger.request(hit.request_id or "")
        length = (hit.position or 0) + 1
        expected: dict[str, Any] = {"chain": _hex(self._ledger.truth(request, hit.pool.pool_id, length))}
        differs = first_difference(hit, request)
        return expected, {"chain": _hex(found.chain), "first_different_position": differs}

    def _writer(self, found: Record | None) -> str | None:
        if found is None or not found.site:
            return None
        return self._ledger.name(found.request)

    def _readers(self, hit: Hit) -> list[Request]:
        names = {hit.request_id, *self._ledger.holders(hit.page)}
        return [request for name, request in self._ledger.requests.items() if name in names]

    def _history(self, page: int) -> tuple[str, ...]:
        return tuple(str(event) for event in self._ledger.history.of(page))


def first_difference(hit: Hit, request: Request) -> int | None:
    """First position at which the row that was read holds another token than the request has."""
    pool = hit.pool
    for position, slot in enumerate(hit.row_slots):
        token = int(pool.records[slot, record.TOKEN_POSITION]) & MASK_32
        if token != request.tokens[position + pool.view.token_offset] & MASK_32:
            return position
    return None


def _grant(facts: Facts, found: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    every = facts.hit.pool.full_layers
    missing = [layer for layer in range(facts.hit.pool.view.num_layers) if not found.layers >> layer & 1]
    expected = {"generation": facts.granted, "layers": every.bit_count()}
    return expected, {"generation": found.generation, "layers": every.bit_count() - len(missing), "missing": missing}


def _content(facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    word, hit = facts.word, facts.hit
    if word is None:
        return {"layers": "as written"}, {"layers_changed": list(hit.layers)}
    digits = 2 * hit.pool.view.k[0].element_size()
    expected = {"bits": f"0x{word.old:0{digits}x}", "value": _number(word.old_value)}
    return expected, {"bits": f"0x{word.new:0{digits}x}", "value": _number(word.new_value)}


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _content_names(pool: PoolState, slot: int, layer: int) -> tuple[tuple[int, ...], bool]:
    """Slots that were written with the bytes that lie here now, and whether these are all zero."""
    value = lane_a_of_slots(pool, torch.tensor([slot], device=pool.records.device))[layer, 0]
    same = (pool.content_a[layer] == value).nonzero().flatten().tolist()
    return tuple(other for other in same if other != slot), bool(value == pool.keys.start_a[layer])


def _write_step(found: Record | None) -> int | None:
    return found.step if found is not None and found.site else None


def _write_site(found: Record | None) -> tuple[str, int] | None:
    return unpack_site(found.site)[:2] if found is not None and found.site else None


def _evidence(hits: Sequence[Hit]) -> tuple[str, ...]:
    lines = [
        f"{hit.code} {CODES[hit.code].name}: {hit.pool.name} slot {hit.slot}"
        + ("" if hit.position is None else f", position {hit.position}")
        + f", seen by {site_name(*hit.site)}"
        for hit in hits[:EVIDENCE_LINES]
    ]
    if len(hits) > EVIDENCE_LINES:
        lines.append(f"and {len(hits) - EVIDENCE_LINES} more checks of the same fault")
    return tuple(lines)


def _hex(value: int | None) -> str | None:
    return None if value is None else f"0x{value:016x}"
