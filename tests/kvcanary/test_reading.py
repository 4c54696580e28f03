"""What rows are judged by: their grants, the records as written, the request's tokens, the forward's own writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs

from kvcanary import Finding, KVCorruptionError, ReadPlan


def with_index(plan: ReadPlan, place: int, slot: int) -> ReadPlan:
    """The plan with another slot at one place of its index array."""
    indices = plan.indices.clone()
    indices[place] = slot
    return replace(plan, indices=indices)


def first_finding(run, *arguments: object) -> Finding:
    with pytest.raises(KVCorruptionError) as caught:
        run(*arguments)
    return caught.value.findings[0]


def own_places(plan) -> range:
    """Where the verify forward's own entries lie in the index array of one request."""
    return range(len(plan.indices) - plan.num_written, len(plan.indices))


def test_a_row_that_reads_a_prefix_slot_for_a_node_has_a_wrong_position(make_engine):
    """The end of a row must be what the forward writes: another slot of the request is judged by its record."""
    engine = make_engine()
    engine.start("only", 9)
    old = engine.slot("only", 3)
    engine.change_read = lambda kind, index, pool, plan: (
        with_index(plan, own_places(plan)[0], old) if kind == "verify" else plan
    )
    finding = first_finding(engine.step)
    assert (finding.code, finding.slot, finding.position) == ("R4", old, 9)


def test_a_row_that_reads_a_sibling_for_a_node_breaks_the_chain(make_engine):
    """A node of the same depth has the position of the one that should be read; its token tells them apart."""
    engine = make_engine(num_steps=1, num_nodes=3, topk=2)
    engine.start("only", 9)
    engine.random.choice = lambda values: values[0]  # both nodes are children of the root

    def change(kind, index, pool, plan):
        places = own_places(plan) if kind == "verify" else ()
        return with_index(plan, places[1], int(plan.indices[places[2]])) if places else plan

    engine.change_read = change
    finding = first_finding(engine.step)
    assert (finding.code, finding.position) == ("R5", 10)


def test_what_was_written_under_an_earlier_grant_is_unwritten(make_engine):
    """The same request, the same pages, the same tokens: but the pages were given back in between."""
    engine = make_engine()
    engine.start("only", 9)
    engine.step()
    row = engine.rows["only"]
    engine.canary.on_free("only", row.pages)
    engine.canary.on_alloc("only", row.pages)
    finding = first_finding(engine.step)
    assert (finding.code, finding.slot) == ("R12", engine.slot("only", 0))


def test_a_judged_entry_that_is_written_again_is_judged_again(make_engine):
    """Another request writes over a committed entry, at its position and in its page: the next reader sees it."""
    engine = make_engine(disable=frozenset({"W2", "R8"}))
    engine.start("victim", 9)
    engine.start("thief", 5)
    engine.step("victim")
    position = engine.rows["thief"].committed
    victim = engine.slot("victim", position)

    def change(kind, index, pool, plan):
        if kind != "decode" or pool != "target":
            return plan
        if hasattr(plan, "slots"):
            return replace(plan, slots=torch.tensor([victim]))
        return with_index(plan, len(plan.indices) - 1, victim)

    engine.change_read = engine.change_write = change
    engine.decode("thief")
    finding = first_finding(engine.step, "victim")
    assert (finding.code, finding.slot, finding.reader, finding.writer) == ("R5", victim, "victim", "thief")


def test_a_refused_id_is_out_of_range_and_nothing_else(make_engine):
    """An id outside the pool is R1 where the plan is opened; the null slot in its place is not R2."""
    engine = make_engine(mode="log")
    engine.start("only", 9)
    engine.change_read = lambda kind, index, pool, plan: with_index(plan, 3, -1) if kind == "verify" else plan
    with capture_logs():
        engine.step()
    fired = engine.canary.certificate()["fired"]
    assert (fired["R1"], fired.get("R2")) == (1, None)


def test_entries_that_are_astray_apart_are_each_found(make_engine):
    """The first and the last node read as each other: both are named, and nothing between them."""
    engine = make_engine(mode="log", num_steps=6, topk=1)
    engine.start("only", 9)
    engine.random.choice = lambda values: values[-1]  # a chain: all positions differ

    def change(kind, index, pool, plan):
        if kind != "verify":
            return plan
        first, *_, last = own_places(plan)
        first_slot, last_slot = plan.indices[[first, last]].tolist()
        return with_index(with_index(plan, first, last_slot), last, first_slot)

    engine.change_read = change
    with capture_logs():
        engine.step()
    fired = engine.canary.certificate()["fired"]
    assert fired == {"R4": 2}


@pytest.mark.parametrize("column", range(8))
def test_every_word_of_a_record_is_guarded(make_engine, column):
    """A stray write into any column is found by the next forward that reads the slot."""
    engine = make_engine()
    engine.start("only", 9)
    engine.step()
    slot = engine.slot("only", 4)
    engine.canary.session.state.by_name["target"].records[slot, column] ^= 1 << 40
    finding = first_finding(engine.step)
    assert (finding.code, finding.slot) == ("R3", slot)


def test_damage_moves_with_a_record(make_engine):
    """A record that was hit before its slot was moved is damaged at the destination too."""
    engine = make_engine(page_size=1)
    engine.start("only", 9)
    engine.step()
    source, destination = engine.slot("only", 4), engine.rows["only"].pages[-1]
    pool = engine.canary.session.state.by_name["target"]
    pool.records[source, 2] ^= 1 << 40
    engine.pools["target"].kv[:, destination] = engine.pools["target"].kv[:, source]
    engine.canary.on_move("target", torch.tensor([source]), torch.tensor([destination]))
    engine.canary.drain()
    assert pool.records[destination, 2] ^ pool.expected[destination, 2] == 1 << 40
