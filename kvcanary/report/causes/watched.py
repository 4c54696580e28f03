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
