"""Rules about writes: how a forward may have come to write a wrong place."""

from __future__ import annotations

from kvcanary.facts import Facts
from kvcanary.findings import Cause
from kvcanary.sites import TREE_KINDS


def stored_twice(facts: Facts) -> Cause | None:
    if not facts.hit.layers:
        return None
    evidence = (f"layer {facts.hit.layers[0]} was marked as stored already",)
    return Cause("order", "the layer's store ran twice in this forward", "derived", evidence)


def shared_slot(facts: Facts) -> Cause | None:
    if facts.hit.layers:
        return None
    text = "two entries of this forward were given one slot"
    return Cause("draft" if facts.hit.site[0] in TREE_KINDS else "addressing", text, "derived")


def tree_positions(facts: Facts) -> Cause | None:
    if facts.hit.site[0] not in TREE_KINDS:
        return None
    evidence = (f"position {facts.hit.position}, the parent's is {facts.hit.parent_position}",)
    return Cause("draft", "positions of the tree are off, or of an earlier step", "inferred", evidence)


def stale_positions(facts: Facts) -> Cause | None:
    return Cause("graphs", "a replayed batch kept positions of an earlier one", "inferred")


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
