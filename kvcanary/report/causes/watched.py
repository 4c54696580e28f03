"""Causes in caches that are only watched, where nobody tells of pages and a forward's own writes are its records."""

from __future__ import annotations

from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause


def stored_astray(facts: Evidence) -> Cause | None:
    """Where nobody tells of pages: the step that reads the slot has written another position there."""
    if facts.declared is not None or facts.record is None or facts.write_step != facts.violation.step:
        return None
    if facts.record.position == facts.violation.position:
        return None
    position = f"position {facts.record.position} of {facts.writer!r}"
    evidence = (f"{facts.last_write} was to store {position} there",)
    return Cause("addressing", "another row's entry was stored into this slot", "derived", evidence)


def freed_under_its_reader(facts: Evidence) -> Cause | None:
    """Where an engine tells of slots alone: the row stored there, or another has since, and the slot is not its own."""
    if facts.declared is not None or facts.record is None or not facts.record.site:
        return None
    if facts.writer == facts.violation.request_id:
        evidence = (f"the entry there is the row's own, {facts.last_write}", *facts.violation.notes[1:])
        return Cause("lifetime", "the slot was given back while the row still reads it", "derived", evidence)
    if facts.violation.code == "R8":
        evidence = (f"{facts.writer!r} has stored there since, {facts.last_write}", *facts.violation.notes[1:])
        return Cause("lifetime", "the slot was given back too early, and another request has it", "inferred", evidence)
    return None
