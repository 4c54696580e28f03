"""Faults between replays: what changes under a captured step is found in the very replay that reads it."""

from __future__ import annotations

import pytest

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary_kernels.record import CHAIN
from spec_engine import Engine, EngineConfig, SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = ["def f(a):", "class A:", "import os"]
FIRST = 4  # entries of rows that have been in a committed page since their prefill


@pytest.fixture(params=DEVICES)
def running(request) -> Engine:
    """Three requests in a bucket of four, in the midst of drafting; the canary logs, and reads all bytes each step."""
    settings = {"dtype": "float32", "device": request.param, "page_size": 4, "topk": 2, "num_steps": 3}
    settings |= {"max_total_tokens": 512, "context_length": 64, "max_running_requests": 4, "prefix_cache": False}
    canary = CanaryConfig(mode="log", seed=5, budget=1 << 30)
    engine = Engine(EngineConfig(graphs="on", graph_buckets=[4], canary=canary, **settings))
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True))
    while min((request.committed_len for request in engine.running), default=0) < 2 * FIRST:
        engine.step()
    assert engine.canary.findings == []
    return engine


def found(engine: Engine) -> set[tuple[str, str, int, str | None]]:
    """(code, kind of forward, slot, reader) of each incident that the next step finds."""
    before = len(engine.canary.findings)
    engine.step()
    new = engine.canary.findings[before:]
    assert {finding.step for finding in new} <= {engine.canary.step}
    return {(finding.code, finding.site[0], finding.slot, finding.reader) for finding in new}


def slot_of(engine: Engine, number: int, position: int) -> int:
    return int(engine.request_table.table[engine.running[number].row, position])


def test_nothing_without_a_fault(running):
    """The clean twin of all below."""
    for _ in range(3):
        assert found(running) == set()


def test_a_flipped_bit_of_a_record(running):
    """R3 by the verify that reads the slot."""
    slot = slot_of(running, 1, 3)
    running.canary._state.by_name["target"].records[slot, CHAIN] ^= 1 << 40
    assert found(running) == {("R3", "verify", slot, "req-1")}


def test_a_flipped_bit_of_the_bytes(running):
    """R9 by the rolling check of the same step, whose budget is all bytes; no forward sees it."""
    slot = slot_of(running, 2, 1)
    running.pools["target"].kv[2, slot, 1, 0].view(dtype=running.pools["target"].kv.dtype)[3] += 1.0
    assert found(running) == {("R9", "sweep", slot, "req-2")}


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_all_bytes_of_captured_rows_under_content_full(schedule):
    """The step whose rows read the bytes says so before its tokens leave, whatever the budget's turn."""
    settings = {"dtype": "float32", "page_size": 4, "draft": "none", "context_length": 64, "prefix_cache": False}
    canary = CanaryConfig(mode="raise", seed=5, content="full")
    engine = Engine(EngineConfig(graphs="on", schedule=schedule, max_total_tokens=512, canary=canary, **settings))
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=40, ignore_eos=True))
    while not engine.running or engine.running[0].output_len < 3:
        engine.step()
    engine.pools["target"].kv[2, slot_of(engine, 0, 1), 1, 0][3] += 1.0
    step = engine.canary.step
    if schedule == "overlap":
        engine.step()  # clean tokens leave, the damaged step is launched
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert [(finding.code, finding.step) for finding in caught.value.findings] == [("R9", step + 1)]


def test_a_stale_index_row(running):
    """The request table names another request's slot: verify and drafts read it, and say whose it is."""
    stolen = slot_of(running, 0, 2)
    running.request_table.table[running.running[1].row, 2] = stolen
    assert ("R8", "verify", stolen, "req-1") in found(running)


def test_a_page_that_was_freed_and_reused(running):
    """The row still names a page that is another request's by now, and holds nothing of that grant: R12, R8 behind."""
    one, other = running.running[0], running.running[1]
    page = one.pages[0]
    running.canary.on_free(one.request_id, [page])
    running.canary._ledger.leave_quarantine(running.canary.step, 0, 1)
    running.canary.on_alloc(other.request_id, [page])
    assert found(running) == {("R12", "verify", 4 * page, "req-0")}


def test_a_padding_row_aimed_at_a_live_slot(running):
    """W9 at the slot: row 0 of the request table, which is padding's, names one that a request owns."""
    slot = slot_of(running, 1, 0)
    running.request_table.table[0, 0] = slot
    assert ("W9", slot) in {(code, at) for code, _, at, _ in found(running)}


def test_a_length_that_the_device_has_wrong(running):
    """R10: the relay holds one entry too many; truth is the host's, not the engine's own lengths."""
    running.relay.lens[running.running[2].row] += 1
    assert "R10" in {code for code, *_ in found(running)}
