"""From violations to findings, whatever kind of pool they lie in: the only place where a Finding is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcanary.calls.violation import NO_SLOT, Violation, fair_share, join_violations
from kvcanary.calls.violation_log import ViolationGroup
from kvcanary.hardware.identity import address_of, hardware_of
from kvcanary.pools.launch_site import site_name
from kvcanary.pools.views import PoolView
from kvcanary.report.causes.ranking import rank_causes
from kvcanary.report.evidence import Evidence, expected_and_found, tokens_of
from kvcanary.report.finding import Finding

EVIDENCE_LINES = 6
MOST_DESCRIBED = 64  # incidents of one check that become findings; the others are counted
_UNDECLARED = frozenset({"R3", "R9", "P1", "T1"})
#: What is known of an incident, and its place among those of one check: less is looked for in later ones.
Read = Callable[[Sequence[Violation], int], Evidence]


class Described(NamedTuple):
    """`undescribed`: incidents that are only counted, since there were too many."""

    findings: list[Finding]
    undescribed: int


class Describer:
    """Makes findings; runs only when something fired.

    read:        what every kind of pool has of its own: what it knows of an incident
    show_tokens: token ids may appear in findings
    """

    def __init__(self, read: Read, show_tokens: bool = False) -> None:
        self._read, self._show_tokens = read, show_tokens

    def describe(
        self, groups: Sequence[ViolationGroup], number_of: Callable[[Sequence[Violation]], int], action: str = ""
    ) -> Described:
        """Join what a violation log kept, and describe its incidents; `number_of` gives an incident its number."""
        incidents = join_violations([violation for group in groups for violation in group.kept])
        reported = fair_share(incidents, MOST_DESCRIBED)
        findings = [
            self.finding(incident, number_of(incident), action, place) for place, incident in enumerate(reported)
        ]
        return Described(findings, len(incidents) - len(reported))

    def finding(self, incident: Sequence[Violation], number: int, action: str = "", place: int = 0) -> Finding:
        """The finding of one incident."""
        facts = self._read(incident, place)
        violation = facts.violation
        writes = violation.code[0] in "WN"
        expected, seen = expected_and_found(facts)
        if self._show_tokens:
            wanted, token = tokens_of(facts)
            expected, seen = expected | wanted, seen | token
        return Finding(
            code=violation.code,
            name=violation.meaning.name,
            sentence=violation.sentence,
            pool=violation.pool.name,
            page=violation.page,
            slot=violation.slot,
            offset=violation.offset,
            position=violation.position,
            layer=violation.layers[0] if violation.layers else None,
            layers=violation.layers,
            **{name: getattr(facts.word, name, None) for name in ("part", "head", "dim", "byte", "bit")},
            site=violation.site,
            step=violation.step,
            reader=None if writes else violation.request_id,
            writer=violation.request_id if writes else facts.writer,
            write_step=violation.step if writes else facts.write_step,
            write_site=violation.site if writes else facts.write_site,
            undeclared=_is_undeclared(facts),
            owner=facts.owner,
            expected=expected,
            found=seen,
            bytes_of=facts.provenance,
            last_good_step=violation.last_good,
            first_bad_step=violation.step,
            history=facts.history,
            readers=facts.readers,
            exposed_tokens=facts.exposed_tokens,
            causes=rank_causes(facts),
            evidence=violation.notes + _from_peer(violation) + _layers_of_model(violation) + _others(facts.incident),
            incident=number,
            action=action,
            entry=None if violation.state is None else violation.slot,
            healed="",
            hardware=_hardware(facts),
            peer=peer_of(violation),
        )


def _is_undeclared(facts: Evidence) -> bool:
    """Whether other bytes lie there than the last declared write has left: a check of the bytes says so, or they do."""
    violation = facts.violation
    if violation.arrival is not None:
        return False
    if violation.code in ("R4", "R5", "R6"):
        return facts.declared is not None and facts.record is not None and not facts.holds_its_own
    return violation.code in _UNDECLARED


def _hardware(facts: Evidence) -> dict[str, Any]:
    """Machine and device as they are now, and where the slot's first layer that differs lies, or its changed word."""
    violation = facts.violation
    view: Any = violation.pool.view
    here = hardware_of(getattr(view, "device", None))
    if not isinstance(view, PoolView) or not 0 <= violation.slot < view.num_slots:
        return here
    return here | address_of(view, violation.slot, violation.layers[0] if violation.layers else 0, facts.word)


def peer_of(violation: Violation) -> dict[str, Any] | None:
    """The engine that the bytes arrived from, and the page of it that they were."""
    if violation.arrival is None:
        return None
    trip = violation.arrival.trip
    sent, page, _ = trip.pages[violation.arrived_as // trip.page_size]
    return None if sent.peer is None else {**sent.peer._asdict(), "page": sent.pages[page]}


def _from_peer(violation: Violation) -> tuple[str, ...]:
    peer = peer_of(violation)
    if peer is None:
        return ()
    layers = ", ".join(map(str, violation.layers[:EVIDENCE_LINES]))
    where = f"its page {peer['page']}, layer {layers}"
    return (f"arrived from {peer['engine']} rank {peer['rank']}, {where} ({peer['uuid']})",)


def _layers_of_model(violation: Violation) -> tuple[str, ...]:
    """What the whole model calls the layers of a pipeline stage."""
    numbers = getattr(violation.pool.view, "layer_numbers", ())  # caches of transformers are never cut
    if list(numbers) == list(range(len(numbers))):
        return ()
    named = ", ".join(str(numbers[layer]) for layer in violation.layers[:EVIDENCE_LINES])
    return (f"in the whole model: layer {named}",) if named else ()


def _others(incident: Sequence[Violation]) -> tuple[str, ...]:
    """What else fired for the same fault."""
    arrival = incident[0].arrival
    violations = [violation for violation in incident[1:] if arrival is None or violation.arrival is not arrival]
    lines = [
        f"{violation.code} {violation.meaning.name}: {_place(violation)}{site_name(*violation.site)}"
        for violation in violations[:EVIDENCE_LINES]
    ]
    if len(violations) > EVIDENCE_LINES:
        lines.append(f"and {len(violations) - EVIDENCE_LINES} more checks of the same fault")
    return tuple(lines)


def _place(violation: Violation) -> str:
    if violation.slot == NO_SLOT and violation.code == "H1":
        return f"{violation.pool.name} pool, "
    position = "" if violation.position is None else f", position {violation.position}"
    return f"{violation.pool.name} slot {violation.slot}{position}, seen by "
