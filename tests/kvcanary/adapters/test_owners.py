"""Owners of slots in watched pools: what an engine tells of grants, prefix caches and frees is judged."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig
from kvcanary.adapters.observed import moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.incident_dumps import OWNERS_ALONE
from kvcanary.adapters.observed.owners import FEW_CHANGES, MOST_CHANGES, SHARED, UNJUDGED, BlockOwners
from kvcanary.adapters.observed.state import RING
from kvcanary.scrub.free_slots import UNPOISONED

from .row_engine import RowEngine
from .test_inputs import running, told


def owned() -> tuple[RowEngine, torch.Tensor, dict[str, int]]:
    """Two rows that have been granted their slots, those of row 0, and the number of each request."""
    engine = running()
    owners, uids = engine.canary.follow_owners(), {name: uid for uid, name in engine.canary.writers.items()}
    slots = [moves.slots_of(engine.canary.groups[0], engine.table[number]) for number in (0, 1)]
    for number, own in enumerate(slots):
        owners.slots[own] = uids[f"r{number}"]  # before it stored there
    engine.step({0: [1], 1: [2]})
    return engine, slots[0], uids


def test_what_was_granted_is_silent_and_the_certificate_says_that_it_is_judged() -> None:
    """Rows read and write their own slots; R7, R8, W2 and W3 are not inactive any more."""
    engine, _, _ = owned()
    assert told(engine) == []
    assert not {"R7", "R8", "W2", "W3", "W7", "P1"} & set(engine.canary.certificate()["inactive_classes"])


def test_a_slot_that_was_given_back_is_told_with_its_cause() -> None:
    """It waits for the next forward; then the row reads what is nobody's: R7 at its position, lifetime."""
    engine, slots, _ = owned()
    engine.canary.owners.freed(slots[3:4])
    assert told(engine) == []
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position, finding.causes[0].family) == ("R7", "r0", 3, "lifetime")
    assert "the slot was given back, and is free" in finding.evidence
    assert finding.history == (OWNERS_ALONE,)


def test_a_prefix_cache_takes_nothing_that_was_given_back() -> None:
    """Freed, and then taken by the cache with the rest of its row: it is free all the same, R7 before any poison."""
    engine, slots, _ = owned()
    engine.canary.owners.freed(slots[3:4])
    engine.canary.owners.shared(slots[:8])
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position) == ("R7", "r0", 3)


def test_what_a_load_brings_may_be_read_though_its_slots_were_given_back() -> None:
    """A host tier takes slots that nobody has any more, and rows begin with what it loads there."""
    engine, slots, _ = owned()
    engine.canary.owners.freed(slots[3:4])
    engine.canary.owners.loaded(slots[3:4])
    engine.step({0: [1], 1: [2]})
    assert told(engine) == []


def test_a_slot_that_another_row_was_granted_is_told_with_its_owner() -> None:
    """R8 names who was granted the slot."""
    engine, slots, uids = owned()
    engine.canary.owners.granted(slots[3:4], torch.tensor([uids["r1"]]))
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position) == ("R8", "r0", 3)
    assert "the slot was granted to 'r1'" in finding.evidence


def test_a_slot_that_its_own_row_was_granted_again_is_told_with_what_lay_there() -> None:
    """Freed under its reader, and granted to that for its next entries: R12 until they are stored, with its cause."""
    engine, slots, uids = owned()
    engine.canary.owners.freed(slots[3:4])
    engine.canary.owners.granted(slots[3:4], torch.tensor([uids["r0"]]))
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.position) == ("R12", "r0", 3)
    [cause] = finding.causes
    assert (cause.family, cause.text) == ("lifetime", "the slot was given back while the row still reads it")
    assert cause.evidence == ("the slot was granted again since, to 'r0': position 3 of 'r0' lay there",)


def test_an_entry_whose_slot_another_of_its_row_has_names_both_slots(monkeypatch) -> None:
    """The first of two entries is stored where the second belongs: no record is left of it, and the other finds it."""
    engine, slots, _ = owned()
    read = engine.canary.read

    def astray(forward) -> None:
        forward.slots[0][0] = int(slots[11])
        read(forward)

    monkeypatch.setattr(engine.canary, "read", astray)
    engine.step({0: [1, 3], 1: [2, 4]})
    found = {finding.code: finding for finding in told(engine)}["W5"]
    assert (found.writer, found.position, found.slot) == ("r0", 10, int(slots[11]))
    assert (found.expected, found.found) == ({"slot": int(slots[10])}, {"slot": int(slots[11])})


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


def test_a_write_to_a_slot_that_was_given_back_is_told() -> None:
    """W7 with the slot, until it is granted again."""
    engine, slots, uids = owned()
    engine.canary.owners.freed(slots[10:12])
    engine.step({0: [1], 1: [2]})
    engine.canary.owners.on_granted = None  # P1 would tell of the same write
    [finding] = told(engine)
    assert (finding.code, finding.writer, finding.position, finding.slot) == ("W7", "r0", 10, int(slots[10]))
    assert "the slot was given back, and is free" in finding.evidence
    engine.canary.owners.granted(slots[10:12], torch.full((2,), uids["r0"]))
    engine.step({0: [1], 1: [2]})
    assert [finding.code for finding in told(engine)] == ["W7", "R12"]  # what was stored before the grant is not its


def test_an_entry_that_is_stored_elsewhere_names_both_slots(monkeypatch) -> None:
    """A slot that its row does not have for it: where it was stored, where it belongs, and who has that slot."""
    engine, slots, _ = owned()
    read, other = engine.canary.read, int(moves.slots_of(engine.canary.groups[0], engine.table[1])[30])

    def astray(forward) -> None:
        forward.slots[0][0] = other
        read(forward)

    monkeypatch.setattr(engine.canary, "read", astray)
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.writer, finding.position, finding.slot) == ("W2", "r0", 10, other)
    assert (finding.expected, finding.found) == ({"slot": int(slots[10])}, {"slot": other})
    cause = finding.causes[0]
    assert (cause.family, cause.text) == ("addressing", "the forward stores an entry where its row has another one")
    assert "the slot was granted to 'r1'" in cause.evidence


# poison

FREE = slice(24, 32)  # of row 0, whose entries do not reach there


def poisoned() -> tuple[RowEngine, torch.Tensor, dict[str, int]]:
    """Slots of row 0 that were freed, and filled."""
    engine, slots, uids = owned()
    engine.canary.owners.freed(slots[FREE])
    engine.step({0: [1], 1: [2]})
    assert told(engine) == []
    return engine, slots[FREE], uids


def test_a_write_into_a_free_slot_is_told_when_it_is_granted() -> None:
    """P1 of the layer that somebody wrote, with who was granted the slot; then it is looked at no more."""
    engine, slots, uids = poisoned()
    block, offset = divmod(int(slots[5]), engine.canary.groups[0].block_size)
    engine.kv[1][block, :, offset] += 1
    engine.canary.owners.granted(slots, torch.full((8,), uids["r1"]))
    engine.step({0: [1], 1: [2]})
    [finding] = told(engine)
    assert (finding.code, finding.reader, finding.slot, finding.layer) == ("P1", "r1", int(slots[5]), 1)
    assert (finding.site, finding.causes[0].family) == (("grant", 0), "lifetime")
    engine.canary.owners.granted(slots, torch.full((8,), uids["r0"]))
    engine.step({0: [1], 1: [2]})
    assert len(told(engine)) == 1


def test_a_sound_free_slot_is_silent_and_what_is_granted_is_not_filled() -> None:
    """Freed, filled, granted, and stored as ever; freed and granted before one forward, too."""
    engine, slots, uids = poisoned()
    engine.canary.owners.granted(slots, torch.full((8,), uids["r0"]))
    engine.canary.owners.freed(slots)
    engine.canary.owners.granted(slots, torch.full((8,), uids["r0"]))
    for _ in range(24):
        engine.step({0: [1], 1: [2]})
    assert told(engine) == []
    assert engine.canary.coverage.unchecked == {}


def test_a_flush_does_what_waits_where_free_slots_are_filled(monkeypatch) -> None:
    """Somebody stores before the next forward is shown: what was told comes before that, or it would be overwritten."""
    engine, slots, _ = owned()
    reads: list[str] = []
    monkeypatch.setattr(engine.canary, "read", reads.append)
    engine.canary.flush("empty")
    assert reads == []
    engine.canary.owners.freed(slots[FREE])
    engine.canary.flush("empty")
    assert reads == ["empty"]
    engine.canary.poison = None
    engine.canary.flush("empty")
    assert reads == ["empty"]


def test_what_a_step_has_no_budget_for_is_counted(monkeypatch) -> None:
    """The certificate says how many freed slots were not filled, and these are not judged."""
    engine, slots, uids = owned()
    monkeypatch.setattr(engine.canary.poison, "most", 3)
    engine.canary.owners.freed(slots[FREE])
    engine.step({0: [1], 1: [2]})
    assert engine.canary.certificate()["unchecked"] == {UNPOISONED: 5}
    block, offset = divmod(int(slots[FREE][5]), engine.canary.groups[0].block_size)
    engine.kv[1][block, :, offset] += 1
    engine.canary.owners.granted(slots[FREE], torch.full((8,), uids["r1"]))
    engine.step({0: [1], 1: [2]})
    assert told(engine) == []


def test_a_row_that_goes_is_read_before_its_slots_are_filled() -> None:
    """It leaves, its slots are freed, and all its bytes are read once more with the next forward: silent."""
    engine, slots, uids = owned()
    engine.end(0)
    engine.canary.owners.freed(slots)
    engine.canary.owners.left(uids["r0"])
    engine.step({1: [2]})
    assert told(engine) == []
    assert bool(engine.canary.poison.filled[slots].all())


@pytest.mark.parametrize(
    ("content", "poison"), [("rolling", "finite"), ("write", "finite"), ("full", "off"), ("full", "nan")]
)
def test_nobody_writes_into_the_pool_who_was_not_asked(content: str, poison: str) -> None:
    """Content `full` with the finite pattern is what asks; else P1 is inactive, and free slots stay as they are."""
    canary = PagedCanary(CanaryConfig(mode="log", content=content, poison=poison), 4, 1, 8, "cpu")
    canary.memory.add_group(0, 4, 16, null_slots=4)
    canary.follow_owners()
    assert canary.poison is None
    assert "P1" in canary.certificate()["inactive_classes"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count", [1, FEW_CHANGES, FEW_CHANGES + 1, 200])
def test_changes_of_blocks_are_there_with_the_next_forward(device: str, count: int) -> None:
    """Few travel in the line of the forward, more have launches of their own; the forward may be the last once more."""
    engine = RowEngine(device, prepares=False)
    owners = engine.canary.follow_blocks([1])
    engine.prepare()
    for number in range(2):
        engine.begin(number, [])
    engine.step({0: [1, 2, 3], 1: [4, 5]})
    expected = torch.full((len(engine.canary.groups[0].records),), UNJUDGED)
    for step in range(RING + 2):  # lines are used again
        changed = range(step, step + (count if step % 2 else 0))
        owners.give(dict.fromkeys(changed, SHARED - step - 5))
        expected[list(changed)] = SHARED - step - 5
        if step < 4:
            engine.step({0: [1], 1: [2]})
        else:
            assert engine.canary.read_again()
            engine.canary.wrote()
        assert owners.of[0].slots.tolist() == expected.tolist()
        assert not owners.is_told


def test_a_hit_of_what_is_stored_in_the_same_step_is_silent() -> None:
    """vLLM lets a request begin with a block that another fills in that step: what lies there before is no record's."""
    engine = running()
    engine.canary.follow_owners().slots.fill_(UNJUDGED)
    line, tokens = engine.table[0].clone(), [(3 * n) % 50 for n in range(12)]
    engine.end(0)
    engine.step({1: [1]})
    assert engine.canary.poison is not None
    engine.canary.poison.freed(moves.slots_of(engine.canary.groups[0], line[:3]))
    engine.step({1: [2]})
    engine.begin(2, [])
    engine.table[2] = line
    engine.step({2: tokens[:6]})
    engine.begin(3, tokens, 12)
    engine.table[3] = line
    engine.step({2: tokens[6:], 3: [7]})
    assert told(engine) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count", [FEW_CHANGES * 16 + 1, MOST_CHANGES, 2 * MOST_CHANGES + 1])
def test_many_changes_of_blocks_are_several_lines(device: str, count: int) -> None:
    """Each block has its own owner; nothing is left for the line of a forward, and other lines are not written to."""
    owners = BlockOwners([count + 1], [1], torch.device(device))
    owners.prepare()
    owners.give({block: block + 7 for block in range(count)})
    owners.apply()
    assert owners.of[0].slots.tolist() == [*range(7, count + 7), UNJUDGED]
    assert (owners.is_told, owners.few()) == (False, (0,))
