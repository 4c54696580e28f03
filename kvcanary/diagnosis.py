"""Diagnosis: what may have caused a finding, best first, each marked as derived or inferred."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcanary.findings import Cause
from kvcanary.sites import site_name, unpack_site

if TYPE_CHECKING:
    from kvcanary.describe import Facts


def rank_causes(facts: Facts) -> tuple[Cause, ...]:
    """Causes that fit what was read, best first."""
    rules = {
        "R9": _content,
        "R4": _position,
        "R5": _chain,
        "R12": _unwritten,
        "R3": _record,
        "R6": _row,
        "R7": _stale,
        "R8": _foreign,
        "W4": _duplicate,
    }
    rule = rules.get(facts.hit.code, _plan)
    return tuple(rule(facts))


def _content(facts: Facts) -> list[Cause]:
    causes = []
    word, layers = facts.word, facts.hit.layers
    if word is not None and word.bit is not None:
        causes.append(Cause(f"one flipped bit: bit {word.bit} of one element, nothing else changed", "derived"))
        causes.append(Cause("a hardware fault, or a stray write of a single bit", "inferred"))
    elif word is not None:
        causes.append(Cause("one 32-bit word was overwritten, nothing else changed", "derived"))
    elif facts.zeroed:
        causes.append(Cause(f"the row of layer {layers[0]} is all zero: cleared after it was written", "derived"))
    elif facts.same_as:
        slots = ", ".join(str(slot) for slot in facts.same_as[:4])
        causes.append(Cause(f"these are the bytes of slot {slots}: copied, or stored in the wrong slot", "derived"))
    else:
        causes.append(Cause("several words changed: an overwrite that nobody declared", "derived"))
    if len(layers) > 1:
        causes.append(Cause(f"{len(layers)} layers differ: a store or copy that went to the wrong slot", "inferred"))
    if len({hit.slot for hit in facts.incident}) > 1:
        causes.append(Cause("several slots of the page changed: a block copy or a zeroing of the page", "inferred"))
    return causes


def _position(facts: Facts) -> list[Cause]:
    swap = _exchanged_pages(facts)
    if swap is not None:
        return [
            Cause(f"entries {swap[0]} and {swap[1]} of the row's page table are exchanged", "inferred"),
            Cause("the records themselves are intact: the table or the index builder is wrong", "derived"),
        ]
    found = facts.record
    if found is not None and facts.owner != facts.hit.request_id:
        return [Cause(f"the row points at a page of {facts.owner!r}", "derived")]
    return [
        Cause("the index array names the wrong slot of the right request", "inferred"),
        Cause("a later forward overwrote the slot with an entry of another position", "inferred"),
    ]


def _exchanged_pages(facts: Facts) -> tuple[int, int] | None:
    """Table entries i and j when the positions found on page i are those of page j and the other way round."""
    size = facts.hit.pool.view.page_size
    row = facts.hit.pool, facts.hit.request_id
    pointed = {
        (hit.position // size, hit.found_position // size)
        for hit in facts.incident
        if (hit.pool, hit.request_id) == row and hit.position is not None and hit.found_position is not None
    }
    pairs = [pair for pair in sorted(pointed) if pair[0] < pair[1] and pair[::-1] in pointed]
    return pairs[0] if pairs else None


def _chain(facts: Facts) -> list[Cause]:
    return [
        Cause("the slot holds a token of another sequence, or of a rejected branch", "inferred"),
        Cause("the entry before it was rewritten after this one was written", "inferred"),
    ]


def _unwritten(facts: Facts) -> list[Cause]:
    found, granted = facts.record, facts.granted
    if found is not None and found.generation == granted:
        return [Cause("a layer did not store its K and V for this entry", "derived")]
    if found is not None and not found.site:
        return [Cause("nobody has ever written this slot", "derived")]
    if facts.owner is None:
        return [Cause("stale: the page was freed, and the row still points at it", "derived")]
    return [Cause("stale: the record is from before the page was granted again", "derived")]


def _stale(facts: Facts) -> list[Cause]:
    if facts.granted:
        return [
            Cause("the page was given back while the row still pointed at it", "derived"),
            Cause("a table entry was not cleared, or an index array is older than the free", "inferred"),
        ]
    return [Cause("nobody was ever granted this page: the table entry was never written", "derived")]


def _foreign(facts: Facts) -> list[Cause]:
    return [
        Cause(f"the row points at a page of {facts.owner!r}", "derived"),
        Cause("a page was freed too early and granted again, or the row of another request was indexed", "inferred"),
    ]


def _record(facts: Facts) -> list[Cause]:
    if facts.hit.fingerprint_hit:
        return [Cause("the stored fingerprint was overwritten: the K and V bytes themselves are right", "derived")]
    return [Cause("something wrote over the canary's memory: a stray write", "inferred")]


def _row(facts: Facts) -> list[Cause]:
    found = facts.record
    site = "" if found is None else f", last written by {site_name(*unpack_site(found.site)[:2])}"
    return [
        Cause(f"the row is complete, but of other tokens{site}: a row or prefix mix-up", "inferred"),
        Cause("the engine fed other tokens than the request has", "inferred"),
    ]


def _duplicate(facts: Facts) -> list[Cause]:
    if facts.hit.layers:
        return [Cause("the layer's store ran twice in this forward", "derived")]
    return [Cause("two entries of this forward were given one slot", "derived")]


def _plan(facts: Facts) -> list[Cause]:
    return [Cause("the index or slot array of this forward was built wrong", "inferred")]
