"""Rules about writes: how a forward may have come to write a wrong place."""

from __future__ import annotations

from kvcanary.facts import Facts
from kvcanary.findings import Cause
from kvcanary.sites import TREE_KINDS
from kvcanary.tickets import FREED, OUTDATED


def stored_twice(facts: Facts) -> Cause | None:
    if not facts.hit.layers:
        return None
    evidence = (f"layer {facts.hit.layers[0]} was marked as stored already",)
    return Cause("order", "the layer's store ran twice in this forward", "derived", evidence)


def shared_slot(facts: Facts) -> Cause | None:
    if facts.hit.layers:
        return None
    text = "two entries of this forward were given one slot"
    is_own = facts.owner is None or facts.owner == facts.hit.request_id
    return Cause("draft" if facts.hit.site[0] in TREE_KINDS and is_own else "addressing", text, "derived")


def tree_positions(facts: Facts) -> Cause | None:
    if facts.hit.site[0] not in TREE_KINDS:
        return None
    evidence = (f"position {facts.hit.position}, the parent's is {facts.hit.parent_position}",)
    return Cause("draft", "positions of the tree are off, or of an earlier step", "inferred", evidence)


def stale_positions(facts: Facts) -> Cause | None:
    hit, reader = facts.hit, facts.reader
    if reader is None or hit.position is None or hit.position >= reader.committed_len:
        return Cause("graphs", "a replayed batch kept positions of an earlier one", "inferred")
    evidence = (f"position {hit.position} was final before this forward", f"{reader.committed_len} entries are final")
    return Cause("graphs", "a replayed batch kept positions of an earlier one", "inferred", evidence)


def over_its_own(facts: Facts) -> Cause | None:
    """The request's own page, at a place that is behind it already."""
    here, position = facts.own_position, facts.hit.position
    if here is None or position is None or here >= position:
        return None
    evidence = (f"the slot was granted for position {here}, the entry stands at {position}",)
    return Cause("addressing", "the slot was computed from another coordinate than the position", "derived", evidence)


def of_no_row(facts: Facts) -> Cause | None:
    """A shared page that the request has not."""
    if facts.reader is None or facts.own_position is not None:
        return None
    text = "an entry of the table or index array names the wrong slot"
    return Cause("addressing", text, "derived", (f"page {facts.hit.page} is in no place of the request's row",))


def published_too_early(facts: Facts) -> Cause | None:
    last = next((event for event in reversed(facts.events) if event.kind in ("published", "forked")), None)
    evidence = (
        () if last is None or last.step < facts.hit.step - 1 else (f"{last}, and written in step {facts.hit.step}",)
    )
    return Cause("lifetime", "the page was shared or published while it was still to be written", "derived", evidence)


def no_token(facts: Facts) -> Cause | None:
    size, record = facts.hit.pool.view.vocab_size, facts.record
    if size is None or record is None or not record.site or record.token < size:
        return None
    evidence = (f"what was fed is no token id below {size}",)
    return Cause(
        "uninitialised", "an input buffer was read before it was filled, or a mark of padding", "inferred", evidence
    )


def unshifted_token(facts: Facts) -> Cause | None:
    if not facts.hit.pool.view.token_offset:
        return None
    evidence = (f"the {facts.hit.pool.name} pool holds tokens {facts.hit.pool.view.token_offset} further",)
    return Cause("draft", "the pool was fed the token of the position itself", "inferred", evidence)


def outdated(facts: Facts) -> Cause | None:
    """Work that was planned for an earlier grant of the page, or that a free did not wait for."""
    hazard = (facts.hit.found or {}).get("hazard")
    if hazard not in (OUTDATED, FREED) or facts.hit.page < 0:
        return None
    text = "the page was given back while work on it was planned or in flight"
    return Cause("lifetime", text, "derived", (f"{hazard}: {(facts.hit.found or {})['access']}",))
