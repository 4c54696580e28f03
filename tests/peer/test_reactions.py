"""What a finding does in each mode, and that judging is a function of what it is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs

from kvcanary_kernels.judge.count import count_torch, unset_first
from kvcanary_tools.bench.toy.engine import ToyEngine
from toy_findings import bits, found, on, slot_of, with_entry


def test_50_faults_in_one_step_are_50_findings(make_engine):
    """All are counted, whatever their order."""
    engine = make_engine(mode="log", page_size=1, num_pages=300)
    engine.start("only", 200)
    struck = [slot_of(engine, "only", position) for position in range(0, 200, 4)]
    for slot in struck:
        bits(engine, 1, slot)[0] ^= 1
    with capture_logs() as logs:
        engine.decode()
    assert sorted(finding.slot for finding in engine.canary.findings) == sorted(struck)
    assert len(logs) == engine.canary.certificate()["findings"][0]["count"] == 50


def test_raise_lists_every_fault_of_the_step(engine):
    """One exception for two faults of two requests, each named with its reader."""
    for name in ("first", "second"):
        bits(engine, 1, slot_of(engine, name, 4))[0] ^= 1
    assert {(finding.code, finding.reader) for finding in found(engine.decode)} == {("R9", "first"), ("R9", "second")}


def fault_out_of_range(engine: ToyEngine) -> None:
    engine.rows["first"].slots[2] = 10**9


def fault_write_out_of_range(engine: ToyEngine) -> None:
    engine.change_write = on("decode", lambda plan: replace(plan, slots=with_entry(plan.slots, 0, -1)))


def fault_foreign_row(engine: ToyEngine) -> None:
    engine.rows["first"].slots[:8] = engine.rows["second"].slots[:8]


def fault_lost_stores(engine: ToyEngine) -> None:
    engine.change_store = lambda *_: None


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (fault_out_of_range, "R1"),
        (fault_write_out_of_range, "W1"),
        (fault_foreign_row, "R8"),
        (fault_lost_stores, "R12"),
    ],
)
def test_log_serves_on_whatever_it_finds(make_engine, fault, code):
    """No kind of finding ends the process in mode log, and tokens keep coming."""
    engine = make_engine(mode="log")
    engine.start("first", 13)
    engine.start("second", 9)
    fault(engine)
    with capture_logs():
        for _ in range(5):
            engine.decode()
        engine.finish("first")
        engine.canary.drain()
    assert code in {group["code"] for group in engine.canary.certificate()["findings"]}
    assert len(engine.rows["second"].tokens) == 9 + 1 + 5


def test_counters_count_on_beyond_32_bits():
    """Totals of findings are 64-bit: they neither wrap nor point anywhere."""
    counts, rows = torch.full((64,), 2**31 - 1), torch.full((1,), 2**32 - 1)
    one = torch.ones(1, dtype=torch.int64)
    header = {"counts": counts, "first": unset_first("cpu"), "row_violations": rows, "arrivals": one - 1}
    count_torch(one, one, starts=one - 1, lengths=one, step=one, **header)
    assert (int(counts[0]), int(rows[0])) == (2**31, 2**32)


def test_the_same_traffic_gives_the_same_records(make_engine):
    """Judging is a function of what it is given: two canaries with one seed write the same bits and count the same."""
    states = []
    for _ in range(2):
        engine = make_engine()
        engine.start("first", 13, chunks=3)
        engine.start("second", 9)
        for _ in range(4):
            engine.draft()
        engine.canary.drain()
        states.append((engine.canary.certificate(), engine.canary.session.state.records.clone()))
    (first, records), (second, again) = states
    assert first == second
    assert torch.equal(records, again)
