"""Rules about identity: an intact entry of somebody else, or under another identity, where the row's own should lie."""

from __future__ import annotations

import numpy as np

from kvcanary.calls.violation import Violation
from kvcanary.ledger.ledger import Request
from kvcanary.pools.spans import SPAN_IDS, is_span_id
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause
from kvcanary_kernels.record.layout import Identity, Record


def other_root(facts: Evidence) -> Cause | None:
    """The row's own tokens at their own positions, under another identity: which part of it differs is said."""
    reader, found = facts.reader, facts.record
    if reader is None or found is None:
        return None
    wrote = facts.written_as
    if wrote is None:
        return _unknown_root(facts, reader, found)
    by, parts = _named(facts.writer), [name for name in Identity._fields if _differs(name, wrote, reader.identity)]
    evidence = (
        "all tokens and positions are those that the row expects",
        f"what differs: {', '.join(map(_PARTS.__getitem__, parts))}",
        *(_both(name, by, wrote, reader.identity) for name in parts if name != "salt"),
        f"written by {by}, {facts.last_write}",
    )
    return Cause("identity", next(text for name, text in _REPLACED.items() if name in parts), "derived", evidence)


#: By field of an identity, in words; and what it means where it is the first of these that differs.
_PARTS = {"salt": "salt", "adapter": "adapter", "adapter_version": "adapter version", "weights": "weights"}
_REPLACED = {
    "salt": "the salt differs: the same tokens of another tenant",
    "adapter": "the adapter differs: the same tokens under another one, or under none",
    "weights": "weights were replaced: what the ones before computed is read as if it were of now",
    "adapter_version": "the adapter was loaded anew with other weights: what the ones before computed is read",
}


def _differs(name: str, one: Identity, other: Identity) -> bool:
    """The version of another adapter says nothing."""
    is_same = getattr(one, name) == getattr(other, name)
    return not is_same and (name != "adapter_version" or one.adapter == other.adapter)


def _both(name: str, writer: str, wrote: Identity, wanted: Identity) -> str:
    values = [getattr(identity, name) or "none" for identity in (wrote, wanted)]
    return f"{_PARTS[name]} {values[0]} when {writer} wrote it, {values[1]} of the row that reads it"


def _unknown_root(facts: Evidence, reader: Request, found: Record) -> Cause | None:
    """As `other_root`, where it is not known any more what was written under."""
    violation = facts.violation
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
        "a root is role, salt, adapter and the versions of both weights",
    )
    text = "the salt or the adapter differs: the same tokens of another tenant, adapter or version of the weights"
    return Cause("identity", text, "derived", evidence)


def other_span(facts: Evidence) -> Cause | None:
    """Both rows have a span where they differ first: equal placeholders of another image, sound or embedding."""
    position, lies, reader = facts.first_difference, facts.different_record, facts.reader
    if facts.violation.code != "R6" or position is None or lies is None or reader is None:
        return None
    place = position + facts.violation.pool.view.token_offset
    wanted = sum(map(int, reader.tokens[place : place + 1]))
    if not is_span_id(np.array([wanted, lies.token])).any():
        return None
    evidence = (
        f"the row differs from position {position} on, within a span",
        f"it holds what {_named(facts.ledger.name(lies.request))} has at position {lies.position}",
        f"{_span(wanted)} was admitted there, not {_span(lies.token)}",
        "what lies in front of it is the row's own",
    )
    text = "an image, sound or embedding of another prompt: its placeholders are equal, its content is not"
    return Cause("identity", text, "derived", evidence)


def _span(token: int) -> str:
    return f"span {token - SPAN_IDS.start:#08x}" if token in SPAN_IDS else "a token"


def other_prompt(facts: Evidence) -> Cause | None:
    """A page that came by a prefix hit or a fork, and holds what another request has there."""
    position, lies = facts.violation.position, facts.record
    if facts.violation.code == "R6":
        position, lies = facts.first_difference, facts.different_record
    elif facts.violation.code == "R5" and facts.row.is_own(position) and position is not None:
        position, lies = position - 1, facts.row.before
    if facts.written_as is not None or other_span(facts) is not None:
        return None
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
