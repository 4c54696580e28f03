"""Owners of slots in watched pools: what an engine tells of grants, prefix caches and frees is judged."""

from __future__ import annotations

import torch

from kvcanary.adapters.observed import moves
from kvcanary.adapters.observed.incident_dumps import OWNERS_ALONE

from .test_inputs import running, told
from .test_paged import Engine


def owned() -> tuple[Engine, torch.Tensor, dict[str, int]]:
    """Two rows that have been granted their slots, those of row 0, and the number of each request."""
    engine = running()
    owners, uids = engine.canary.follow_owners(), {name: uid for uid, name in engine.canary.writers.items()}
    slots = [moves.slots_of(engine.canary.groups[0], engine.table[number]) for number in (0, 1)]
    for number, own in enumerate(slots):
        owners.granted(own, torch.full_like(own, uids[f"r{number}"]))
    engine.step({0: [1], 1: [2]})
    return engine, slots[0], uids


def test_what_was_granted_is_silent_and_the_certificate_says_that_it_is_judged() -> None:
    """Rows read and write their own slots; R7, R8, W2 and W3 are not inactive any more."""
    engine, _, _ = owned()
    assert told(engine) == []
    assert not {"R7", "R8", "W2", "W3"} & set(engine.canary.certificate()["inactive_classes"])


def test_a_slot_that_was_given_back_is_told_with_its_cause() -> None:
    """It waits for the next forward; then the row reads what is nobody's: R7 at its position, lifetime."""
    engine, slots, _ = owned()
    engine.canary.owners.freed(slots[3:4])
    assert told(engine) == []
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position, finding.causes[0].family) == ("R7", "r0", 3, "lifetime")
    assert "the slot is free" in finding.evidence
    assert finding.history == (OWNERS_ALONE,)


def test_a_slot_that_another_row_was_granted_is_told_with_its_owner() -> None:
    """R8 names who was granted the slot."""
    engine, slots, uids = owned()
    engine.canary.owners.granted(slots[3:4], torch.tensor([uids["r1"]]))
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position) == ("R8", "r0", 3)
    assert "the slot was granted to 'r1'" in finding.evidence


def test_what_a_prefix_cache_holds_may_be_read_and_not_written() -> None:
    """Of a row that is gone the rest is the cache's; whoever stores there is told: W3."""
    engine, slots, uids = owned()
    engine.canary.owners.shared(slots[:10])
    engine.step({0: [1], 1: [2]})
    assert told(engine) == []
    engine.canary.owners.left(uids["r0"])
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.writer, finding.position) == ("W3", "r0", 11)


def test_forgetting_frees_everything() -> None:
    """After a flush of the engine nothing that was told before counts."""
    engine, slots, _ = owned()
    engine.canary.owners.shared(slots)
    engine.canary.owners.forget()
    engine.canary.owners.apply()
    assert not engine.canary.owners.slots.any()
