"""What a forward writes, what is moved or copied without one, and what may change when the body has run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcanary import WritePlan
from toy_findings import found, on, places, slot_of, with_entry


def test_a_skipped_slot_is_one_finding_and_its_successors_are_right(engine):
    """Slot -1 is refused and named; the next token of the chain has no wrong position."""
    engine.change_write = on("verify", lambda plan: replace(plan, slots=with_entry(plan.slots, 2, -1)))
    (finding,) = found(engine.draft, "first")
    assert (finding.code, finding.slot) == ("W1", -1)
    assert not any("W5" in line for line in finding.evidence)


def test_a_store_that_went_elsewhere_is_found(engine):
    """The hash is of the values that the body stored, so that a slot which never got them is not blessed."""
    engine.change_store = lambda kind, index, pool, layer, slots, k, v: (
        (slots * 0, k, v) if (kind, layer) == ("decode", 1) else (slots, k, v)
    )
    position = engine.rows["first"].committed
    (finding,) = found(engine.decode, "first")
    assert (finding.code, finding.slot, finding.layers) == ("R9", slot_of(engine, "first", position), (1,))


def test_two_requests_that_write_one_slot_are_found(engine):
    """Double allocation at a branch point: the page has one owner, so that the other's write is refused and named."""
    shared = int(engine.rows["first"].slots[engine.rows["first"].committed])
    engine.change_write = on("decode", lambda plan: replace(plan, slots=with_entry(plan.slots, 1, shared)))
    (finding,) = found(engine.decode)
    assert (finding.code, finding.slot, finding.writer, finding.owner) == ("W2", shared, "second", "first")


def test_bytes_that_move_without_a_word_are_found(engine):
    """An accepted node is copied forward and its record is not: the slot no longer holds what was written there."""
    row = engine.rows["first"]
    kv = engine.pools["target"].kv
    kv[:, row.slots[4]] = kv[:, row.slots[5]]
    assert places(found(engine.decode, "first")) == [("R9", slot_of(engine, "first", 4), 4)]


def test_copied_entries_are_written_and_no_others(engine):
    """A declared copy into a row counts as its writing, as far as it reaches: one entry more is a missing hook."""
    engine.fork("first", "copy", 8, 5)
    engine.canary.drain()
    engine.canary.commit("copy", 6)
    (finding,) = found(engine.canary.drain)
    assert (finding.code, finding.reader, finding.expected, finding.found) == (
        "H1",
        "copy",
        {"entries": 6},
        {"entries": 5},
    )


def test_what_was_written_long_ago_and_just_now_moves_together(make_engine):
    """Fingerprints that are taken already and values that wait for theirs may be sources of one move."""
    engine = make_engine(content="rolling", num_pages=200)
    engine.start("only", 300)
    engine.decode()
    engine.fork("only", "copy", 302, 301)
    for name in ("copy", "only"):
        engine.finish(name)
    assert engine.canary.findings == []


@pytest.mark.parametrize("size", [1, 4])
def test_a_full_page_can_be_published_as_soon_as_its_tokens_are_known(make_engine, size):
    """The draft pool's last entry comes behind the commit; what is full in both pools is final, and may be shared."""
    engine = make_engine(page_size=size, num_pages=200)
    engine.start("first", 7)
    engine.decode()
    assert engine.share("first") == 8 // size
    engine.admit("second", engine.rows["first"].tokens)
    assert engine.acquire("second") == 8 // size
    engine.prefill({"second": 9})
    engine.draft()
    for name in ("first", "second"):
        engine.finish(name)
    assert engine.canary.findings == []


def test_a_plan_may_change_after_the_body_ran(engine):
    """Models that count positions up in place cause no false alarm: what was planned is what was opened."""
    positions = []

    def keep(plan: WritePlan) -> WritePlan:
        positions.append(plan.positions)
        return plan

    def count_up(kind, index, pool, layer, slots, k, v):
        if (kind, layer) == ("decode", 1):
            positions[-1] += 1
        return slots, k, v

    engine.change_write, engine.change_store = on("decode", keep), count_up
    engine.decode()
    engine.decode()
    assert engine.canary.findings == []


def test_an_error_of_the_model_stays_the_error(engine):
    """A body that fails is not hidden behind an error of the canary."""

    def fail(*_: object) -> None:
        raise ArithmeticError("the model failed")

    engine.change_store = fail
    with pytest.raises(ArithmeticError, match="the model failed"):
        engine.decode()
