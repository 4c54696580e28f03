"""Rules about transfers: what a load, restore or swap in has done to the bytes, and who did not wait for a copy."""

from __future__ import annotations

from kvcanary.provenance.arrival import OTHER_LAYOUT, UNKNOWN
from kvcanary.report.arrival_text import evidence_of, sentence_of
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause
from kvcanary.transfers.async_ops import OUTDATED, UNORDERED


def arrived(kind: str, facts: Evidence) -> Cause | None:
    """What a transfer did, where some of its slots are of this kind; a fingerprint names all but two of these."""
    arrival = facts.violation.arrival
    if arrival is None or not arrival.kinds[kind]:
        return None
    basis = "inferred" if kind in (OTHER_LAYOUT, UNKNOWN) else "derived"
    return Cause("transfer", sentence_of(arrival, kind), basis, evidence_of(arrival, kind))


def unordered(facts: Evidence) -> Cause | None:
    """Who used what before which work was done there, and who should have waited for it."""
    due, found = facts.violation.expected or {}, facts.violation.found or {}
    if found.get("hazard") != UNORDERED or "which" not in due:
        return None
    access = f"{found['reader']} {found['used_to']}s {found['resource']}"
    evidence = (f"{due['waiting']} has not waited for the event of {due['behind']}, nor for one behind it",)
    text = f"{access} before {due['behind']} is done, which {due['which']}"
    return Cause("order", text, "derived", evidence)


def taken_again(facts: Evidence) -> Cause | None:
    """A host buffer holds something else by now."""
    due, found = facts.violation.expected or {}, facts.violation.found or {}
    if found.get("hazard") != OUTDATED or facts.violation.page >= 0:
        return None
    meant, now = due.get("generation"), found.get("generation")
    text = f"{found['reader']} is meant for what {found['resource']} held before it was taken again"
    return Cause("order", text, "derived", (f"generation {meant} was meant, it is in {now}: a ring that is too short",))
