"""From hits to findings, whatever kind of pool they lie in: the only place where a Finding is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcanary.calls.violation import NO_SLOT, Hit, fair_share, join_hits
from kvcanary.calls.violation_log import HitGroup
from kvcanary.pools.launch_site import site_name
from kvcanary.report.causes.ranking import rank_causes
from kvcanary.report.evidence import Evidence, expected_and_found, tokens_of
from kvcanary.report.finding import Finding

EVIDENCE_LINES = 6
MOST_DESCRIBED = 64  # incidents of one check that become findings; the others are counted
_UNDECLARED = frozenset({"R3", "R9", "P1", "T1"})
#: What is known of an incident, and its place among those of one check: less is looked for in later ones.
Read = Callable[[Sequence[Hit], int], Evidence]


class Described(NamedTuple):
    """`untold`: incidents that are only counted, since there were too many."""

    findings: list[Finding]
    untold: int


class Describer:
    """Makes findings; runs only when something fired.

    read:        what every kind of pool has of its own: what it knows of an incident
    show_tokens: token ids may appear in findings
    """

    def __init__(self, read: Read, show_tokens: bool = False) -> None:
        self._read, self._show_tokens = read, show_tokens

    def describe(
        self, groups: Sequence[HitGroup], number_of: Callable[[Sequence[Hit]], int], action: str = ""
    ) -> Described:
        """Join what an intake kept, and describe its incidents; `number_of` gives an incident its number."""
        incidents = join_hits([hit for group in groups for hit in group.kept])
        told = fair_share(incidents, MOST_DESCRIBED)
        findings = [self.finding(incident, number_of(incident), action, place) for place, incident in enumerate(told)]
        return Described(findings, len(incidents) - len(told))

    def finding(self, incident: Sequence[Hit], number: int, action: str = "", place: int = 0) -> Finding:
        """The finding of one incident."""
        facts = self._read(incident, place)
        hit, word = facts.hit, facts.word
        writes = hit.code.startswith("W")
        expected, seen = expected_and_found(facts)
        if self._show_tokens:
            wanted, token = tokens_of(facts)
            expected, seen = expected | wanted, seen | token
        return Finding(
            code=hit.code,
            name=hit.meaning.name,
            sentence=hit.sentence,
            pool=hit.pool.name,
            page=hit.page,
            slot=hit.slot,
            offset=hit.offset,
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
            history=facts.history,
            readers=facts.readers,
            exposed_tokens=facts.exposed_tokens,
            causes=rank_causes(facts),
            evidence=hit.notes + _others(facts.incident),
            incident=number,
            action=action,
        )


def _is_undeclared(facts: Evidence) -> bool:
    """Whether other bytes lie there than the last declared write has left: a check of the bytes says so, or they do."""
    hit = facts.hit
    if hit.arrival is not None:
        return False
    if hit.code in ("R4", "R5", "R6"):
        return facts.told is not None and facts.record is not None and not facts.holds_its_own
    return hit.code in _UNDECLARED


def _others(incident: Sequence[Hit]) -> tuple[str, ...]:
    """What else fired for the same fault."""
    arrival = incident[0].arrival
    hits = [hit for hit in incident[1:] if arrival is None or hit.arrival is not arrival]
    lines = [f"{hit.code} {hit.meaning.name}: {_place(hit)}{site_name(*hit.site)}" for hit in hits[:EVIDENCE_LINES]]
    if len(hits) > EVIDENCE_LINES:
        lines.append(f"and {len(hits) - EVIDENCE_LINES} more checks of the same fault")
    return tuple(lines)


def _place(hit: Hit) -> str:
    if hit.slot == NO_SLOT and hit.code == "H1":
        return f"{hit.pool.name} pool, "
    position = "" if hit.position is None else f", position {hit.position}"
    return f"{hit.pool.name} slot {hit.slot}{position}, seen by "
