"""Rules about identity: an intact entry of somebody else, or under another identity, where the row's own should lie."""

from __future__ import annotations

from kvcanary.calls.violation import Violation
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause


def other_root(facts: Evidence) -> Cause | None:
    """The same tokens at the same positions, under another salt or adapter."""
    violation, found, reader = facts.violation, facts.record, facts.reader
    if reader is None or found is None:
        return None
    if violation.code == "R6":
        is_same = facts.first_difference is None and len(violation.row_slots) == (violation.position or 0) + 1
        texts = f"all {len(violation.row_slots)} tokens and positions are the row's"
    else:
        place = violation.pool.view.token_offset
        is_same = violation.position == 0 == found.position and found.token in reader.tokens[place : place + 1]
        texts = "token and position are those that the row expects"
    if not is_same:
        return None
    evidence = (
        texts,
        f"the chain is not: {_named(facts.writer)} wrote it under another root",
        "a root is role, salt and adapter",
    )
    text = "the salt or the adapter differs: the same tokens of another tenant, adapter or version of the weights"
    return Cause("identity", text, "derived", evidence)


def other_prompt(facts: Evidence) -> Cause | None:
    """A page that came by a prefix hit or a fork, and holds what another request has there."""
    position, lies = facts.violation.position, facts.record
    if facts.violation.code == "R6":
        position, lies = facts.first_difference, facts.different_record
    elif facts.violation.code == "R5" and facts.row.is_own(position) and position is not None:
        position, lies = position - 1, facts.row.before
    if facts.row.is_own(position) or (facts.violation.code != "R6" and not facts.is_own_place):
        return None
    given = facts.row.given(position)
    if given is None or lies is None or facts.reader is None or lies.request == facts.reader.uid:
        return None
    number = (position or 0) // facts.violation.pool.view.page_size
    evidence = (
        f"page {facts.reader.pages[number]} of the row was {given}",
        f"it holds what {_named(facts.ledger.name(lies.request))} has at position {lies.position}",
        f"the row's tokens differ from position {position} on",
    )
    return Cause("identity", "a prefix hit, or a fork, brought a page of another prompt", "derived", evidence)


def _named(writer: str | None) -> str:
    return "a request that ended long ago" if writer is None else repr(writer)


def other_predecessor(facts: Evidence) -> Cause | None:
    """The entry is right, and so is what was granted before it: the row looks elsewhere for that."""
    violation, position = facts.violation, facts.violation.position
    if not position or not facts.is_own_place or any(_is_beside(violation, other) for other in facts.incident[1:]):
        return None
    if not (facts.row.is_own(position) and facts.row.is_own(position - 1)):
        return None
    evidence = (
        f"the entry of position {position} is the request's own, in its own place",
        f"so is what was granted for position {position - 1}: the row looks elsewhere for it",
    )
    return Cause("addressing", "the entry before it names another slot than was granted", "derived", evidence)


def _is_beside(violation: Violation, other: Violation) -> bool:
    return other.row == violation.row and other.position == (violation.position or 0) - 1


def rotated(facts: Evidence) -> Cause | None:
    """The last entry of a prompt in a pool that is one token ahead: it took the head of a prompt for what follows."""
    violation, found, differs = facts.violation, facts.record, facts.first_difference
    if not violation.pool.view.token_offset or differs is None or found is None or facts.write_site is None:
        return None
    if facts.write_site[0] != "prefill" or differs != len(violation.row_slots) - 1 or facts.row.first_of is None:
        return None
    evidence = (
        f"{facts.last_write} wrote the entry at a prompt's end",
        f"its token is the first one of {facts.row.first_of!r}, not the one that follows",
    )
    text = "inputs were rotated over more than their own chunk: an end took the head of a prompt"
    return Cause("draft", text, "inferred", evidence)
