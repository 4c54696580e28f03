"""What a row is, and what of it is read: its tokens from the first on, and the index array that attention goes by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcanary import ReadPlan, WritePlan
from toy_findings import bits, found, on, places, slot_of, with_entry

EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]


def test_a_row_of_one_token_is_right(make_engine):
    """One token at position 0 continues the root; as the start of another row it would not be found right."""
    engine = make_engine()
    engine.start("only", [5])
    engine.decode()
    engine.draft()
    engine.finish("only")
    assert engine.canary.findings == []


def test_a_row_that_begins_with_another_token_is_not_the_request_s(make_engine):
    """The single token of a row is judged at its write, not by a successor."""
    engine = make_engine()
    engine.change_write = on("prefill", lambda plan: replace(plan, tokens=plan.tokens + 1), "target")
    assert places(found(engine.start, "only", [5])) == [("W6", slot_of(engine, "only", 0), 0)]


def test_the_newest_token_of_a_row_is_protected_where_it_is_read(make_engine):
    """Also without the check at the write: the record itself is compared with the request's own tokens."""
    engine = make_engine(disable={"W6"})
    engine.change_write = on("prefill", lambda plan: replace(plan, tokens=plan.tokens + 1), "target")
    engine.start("only", [5])
    assert places(found(engine.decode)) == [("R6", slot_of(engine, "only", 0), 0)]


@pytest.mark.parametrize(("pool", "place"), [("target", 3), ("target", 8), ("draft", 3), ("draft", 7)])
def test_another_token_than_the_request_s_is_found_once(make_engine, pool, place):
    """A wrong input token is one finding at its write, and those behind it none; a draft row is one token ahead."""
    engine = make_engine()
    engine.change_write = on(
        "prefill", lambda plan: replace(plan, tokens=plan.tokens ^ (plan.positions == place)), pool
    )
    (finding,) = found(engine.start, "only", 9)
    assert (finding.code, finding.pool, finding.position, finding.evidence) == ("W6", pool, place, ())


def test_a_token_that_the_host_learns_later_is_judged_by_its_first_reader(make_engine):
    """The last entry of a draft prefill is fed what was sampled in the same step; wrong, it is no request's row."""
    engine = make_engine()
    engine.change_write = on("prefill", lambda plan: replace(plan, tokens=plan.tokens ^ (plan.positions == 8)), "draft")
    engine.start("only", 9)
    (finding,) = found(engine.draft)
    assert (finding.code, finding.pool, finding.position, finding.evidence) == ("R6", "draft", 8, ())


@pytest.mark.parametrize("length", [5, 200])
def test_extreme_tokens_are_right_on_host_and_device(make_engine, length):
    """Host truth and records agree for every 32-bit token, in chunks of few entries and of many."""
    engine = make_engine()
    engine.start("only", (EXTREMES * length)[:length])
    engine.decode()
    engine.draft()
    engine.finish("only")
    assert engine.canary.findings == []


@pytest.mark.parametrize("start", [1, 7])
def test_a_first_prefill_at_wrong_positions_is_found_at_once(make_engine, start):
    """Positions that do not begin at 0 are found in the forward that writes them, not in the next one."""
    engine = make_engine()
    engine.change_write = on("prefill", lambda plan: replace(plan, positions=plan.positions + start), "target")
    (finding,) = found(engine.start, "only", 4)
    assert (finding.code, finding.position, finding.step) == ("W5", start, 1)


def test_truth_that_is_not_known_is_counted_not_assumed(engine):
    """Rows whose tokens the host was not told are neither a finding nor silently right."""
    engine.canary.append = lambda *_: None
    engine.decode("first")
    engine.draft("first")
    assert engine.canary.findings == []
    assert engine.canary.certificate()["unchecked"].get("truth not known to the host", 0) > 0


def test_a_zeroed_entry_is_a_null_slot_and_its_successor_stays_checked(engine):
    """An unfilled mapping is named at its place, and so is a fault right behind it."""
    other = slot_of(engine, "second", 6)
    engine.rows["first"].slots[5] = 0
    assert places(found(engine.decode, "first")) == [("R2", 0, 5)]
    engine.rows["first"].slots[6] = other
    (finding,) = found(engine.decode, "first")
    assert any("R8" in line and str(other) in line for line in finding.evidence)


def test_what_attention_reads_is_judged_not_the_row_s_own_slots(engine):
    """The engine's table is right and the forward's index array is not: the array decides."""
    other = slot_of(engine, "second", 2)
    engine.change_read = on("verify", lambda plan: replace(plan, indices=with_entry(plan.indices, 2, other)))
    table = engine.rows["first"].slots.copy()
    assert places(found(engine.draft, "first")) == [("R8", other, 2)]
    assert np.array_equal(engine.rows["first"].slots[: len(table)], table)


def test_a_rejected_draft_slot_that_is_read_again_is_found(make_engine):
    """A node that acceptance dropped is no entry of the row, whatever it holds."""
    engine = make_engine(page_size=1, num_pages=256)
    engine.start("only", 9)
    engine.random.randrange = lambda *_: 0  # the root alone is accepted
    engine.draft()
    del engine.random.randrange
    row = engine.rows["only"]
    assert row.committed == 10
    rejected = int(row.slots[11])
    engine.change_read = on("decode", lambda plan: replace(plan, indices=with_entry(plan.indices, 9, rejected)))
    (finding,) = found(engine.decode)
    assert (finding.code, finding.slot) == ("R4", rejected)


def test_a_forward_without_rows_is_nothing(engine):
    """An empty plan is opened and closed, and counts nothing."""
    nothing = torch.zeros(0, dtype=torch.int64)
    counted = ("slots_checked", "slots_sealed", "bytes_checked", "findings", "unchecked")
    before = engine.canary.certificate()
    engine.begin()
    read = ReadPlan(torch.zeros(1, dtype=torch.int64), nothing, (), 1, nothing, 0)
    substep = engine.canary.forward("decode", 0, "target")
    substep.open(read, WritePlan(nothing, nothing, nothing))
    substep.close()
    engine.canary.collect(engine.canary.end_step())
    after = engine.canary.certificate()
    assert [after[key] for key in counted] == [before[key] for key in counted]


def test_a_row_that_writes_nothing_is_read_all_the_same(engine):
    """A request without new entries in a forward is judged, and nothing of it is written."""
    engine.begin()
    row = engine.rows["first"]
    slots, length = torch.from_numpy(row.slots[: row.committed].copy()), torch.tensor([row.committed])
    nothing = slots[:0]
    read = ReadPlan(torch.tensor([0, row.committed]), slots, ("first",), 1, length, torch.tensor([0]))
    checked = engine.canary.certificate()
    substep = engine.canary.forward("extend", 0, "target")
    substep.open(read, WritePlan(nothing, nothing, nothing))
    substep.close()
    engine.canary.collect(engine.canary.end_step())
    certificate = engine.canary.certificate()
    assert certificate["slots_checked"] == checked["slots_checked"] + row.committed
    assert certificate["slots_sealed"] == checked["slots_sealed"]


def test_each_of_40000_entries_is_checked_once(make_engine):
    """A row of many thousands of entries is counted whole, and a fault in its last one is found."""
    engine = make_engine(layers=1, heads=1, page_size=64, num_pages=700)
    engine.start("only", 40_000)
    before = engine.canary.certificate()["slots_checked"]
    engine.decode()
    assert engine.canary.certificate()["slots_checked"] == before + 40_001
    last = slot_of(engine, "only", 39_999)
    bits(engine, 0, last)[0] ^= 1
    assert places(found(engine.decode)) == [("R9", last, 39_999)]
