"""Dumps of engines with captured steps: a replay on the CPU reaches what the device found."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest

from kvcanary import CanaryConfig
from kvcanary.dumps.reading import read_dump
from kvcanary.faults import arm
from kvcanary.replay.replayer import replay
from kvcanary_kernels.record.layout import CHAIN
from kvcanary_tools.dumps.explaining import explain
from spec_engine import Engine, EngineConfig, SamplingParams

PROMPTS = ["def f(a):", "class A:", "import os"]
TREES = {"topk": 2, "num_steps": 3}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def make(request) -> Callable[..., Engine]:
    """Three requests in a bucket of four, in the midst of decoding, whose recording begins behind their prefill.

    The chains of the second have a root of their own.
    """

    def running(mode: str = "log", ring: int = 2, content: str = "rolling", **settings: object) -> Engine:
        settings = {"dtype": "float32", "device": request.param, "page_size": 4, "prefix_cache": False} | settings
        settings |= {"max_total_tokens": 512, "context_length": 64, "max_running_requests": 4}
        canary = CanaryConfig(mode=mode, seed=5, budget=1 << 30, ring=ring, content=content)
        engine = Engine(EngineConfig(graphs="on", graph_buckets=[4], canary=canary, **settings))
        for prompt, salt in zip(PROMPTS, ("", "tenant", ""), strict=True):
            engine.submit(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True), salt=salt)
        while engine.canary.step < 5:
            engine.step()
        return engine

    return running


def slot_of(engine: Engine, number: int, position: int) -> int:
    return int(engine.request_table.table[engine.running[number].row, position])


def flip_a_bit_of_a_record(engine: Engine) -> None:
    engine.canary.session.state.by_name["target"].records[slot_of(engine, 1, 3), CHAIN] ^= 1 << 40


def change_a_value(engine: Engine, number: int = 2) -> None:
    engine.pools["target"].kv[2, slot_of(engine, number, 1), 1, 0][3] += 1.0


def steal_a_slot(engine: Engine) -> None:
    engine.request_table.table[engine.running[1].row, 2] = slot_of(engine, 0, 2)


def aim_padding_at_a_page(engine: Engine) -> None:
    engine.request_table.table[0, 0] = slot_of(engine, 1, 0)


def lengthen_a_row(engine: Engine) -> None:
    engine.relay.lens[engine.running[2].row] += 1


FAULTS = {
    "R3": flip_a_bit_of_a_record,
    "R9": change_a_value,
    "R8": steal_a_slot,
    "W9": aim_padding_at_a_page,
    "R10": lengthen_a_row,
}


CASES = [*((code, TREES) for code in FAULTS), ("R8", {"topk": 1, "num_steps": 3}), ("R10", {"draft": "none"})]
CASES += [("R9", {"draft": "none", "content": "full"}), ("R9", {**TREES, "content": "full"})]


@pytest.mark.parametrize(("code", "settings"), CASES, ids=str)
def test_the_same_finding_is_reached(make, tmp_path, code, settings):
    """Nothing before the fault; after it the same incidents, in the same order, at the same places."""
    engine = make(**settings)
    before = replay(read_dump(engine.canary.dump(tmp_path / "before.kvdump")))
    assert (engine.canary.findings, before.findings, before.errors) == ([], [], [])
    FAULTS[code](engine)
    engine.step()
    dump = read_dump(engine.canary.dump(tmp_path / "found.kvdump"))
    assert dump.manifest["first_step"] > 0
    outcome = replay(dump)
    assert code in {finding.code for finding in engine.canary.findings}
    found, reached = (
        [(f.code, f.slot, f.site) for f in findings] for findings in (engine.canary.findings, outcome.findings)
    )
    assert reached == found
    assert outcome.missing == []


def test_a_story_names_captured_writers(make, tmp_path):
    """Who wrote and read a slot is told of captured forwards as of any."""
    engine = make()
    slot = slot_of(engine, 0, engine.running[0].committed_len - 1)
    engine.canary.session.state.by_name["target"].records[slot, CHAIN] ^= 1 << 40
    engine.step()
    story = explain(read_dump(engine.canary.dump(tmp_path / "found.kvdump")), 0)["story"]
    assert {"wrote", "found"} <= {line["kind"] for line in story}
    assert any("verify" in line["text"] for line in story if line["kind"] == "wrote")


LAGGING = [
    ("R3", TREES, "log"),
    ("R8", TREES, "abort"),
    ("R10", TREES, "log"),
    ("R9", {"topk": 1, "num_steps": 3}, "abort"),
    ("R9", {"draft": "none"}, "log"),
    ("W9", {"draft": "none"}, "abort"),
    ("R10", {"draft": "none"}, "abort"),
    ("R10", {"draft": "none"}, "log"),
    ("R8", TREES, "log"),
]


def strike_twice(make, code: str, settings: dict, mode: str) -> Engine:
    """A lagging host's engine with a fault, and three steps later a changed value of another request.

    The host's own check of proposals, which ends the engine where a length is wrong, does not look.
    """
    engine = make(schedule="overlap", mode=mode, ring=7, **settings)
    with patch("spec_engine.step.verify.check_proposals"):
        FAULTS[code](engine)
        for _ in range(3):
            engine.step()
        change_a_value(engine, 0)
        for _ in range(4):
            engine.step()
    return engine


@pytest.mark.parametrize(("code", "settings", "mode"), LAGGING, ids=str)
def test_what_a_lagging_host_found_later_is_reached_too(make, tmp_path, code, settings, mode):
    """Steps that were judged when the next ones ran, a second fault some steps later: the same incidents, in order."""
    engine = strike_twice(make, code, settings, mode)
    dump = read_dump(engine.canary.dump(tmp_path / "found.kvdump"))
    assert dump.manifest["first_step"] > 0
    outcome = replay(dump)
    found, reached = (
        [(f.code, f.slot, f.position, f.step, f.site) for f in findings]
        for findings in (engine.canary.findings, outcome.findings)
    )
    assert code in {finding.code for finding in engine.canary.findings}
    assert len({finding.step for finding in engine.canary.findings}) > 1
    assert reached == found
    assert (outcome.missing, outcome.errors) == ([], [])


def test_a_lagging_host_tells_places_as_the_run_had_them(make):
    """The buffers hold the next step's rows by then: a position is told by where rows began in the step that fired."""
    engine = strike_twice(make, "R10", TREES, "log")
    reported = [finding for finding in engine.canary.findings if finding.code == "R4"]
    assert reported
    for finding in reported:
        places = [finding.position] + [
            int(text.partition("position ")[2].partition(",")[0]) for text in finding.evidence if "R4" in text
        ]
        assert all(slot_of(engine, 2, place) == finding.slot for place in places)


def test_hearing_of_a_step_loses_nothing_of_the_next_one(make):
    """A row that is too long reads behind its pages in step two, which has run when the host hears of step one."""
    engine = make(schedule="overlap", ring=7, draft="none")
    listener, reported = engine.canary.session.checks.captured.listener, []
    noticed = listener.noticed
    listener.noticed = lambda hit: (reported.append((hit.step, hit.code, hit.slot, hit.is_exact)), noticed(hit))
    lengthen_a_row(engine)
    for _ in range(4):
        engine.step()
    assert {hit for hit in reported if hit[1] == "R2"} == {(7, "R2", 0, True)}
    assert (6, "R12", slot_of(engine, 2, 6), True) in reported


def test_a_lagging_host_ends_all_rows_of_a_fault_that_passes(make):
    """Two rows read another's slot in one step; the buffers hold the next step's codes when the host collects it."""
    engine = make(schedule="overlap", mode="abort", ring=7, draft="none")
    table, rows = engine.request_table.table, [request.row for request in engine.running[1:]]
    names = [request.request_id for request in engine.running]
    right = table[rows, 2].clone()
    table[rows, 2] = slot_of(engine, 0, 2)
    events = engine.step()
    table[rows, 2] = right
    while engine.has_work:
        events += engine.step()
    reasons = {event.request_id: event.finish_reason for event in events if event.finish_reason is not None}
    assert reasons == dict(zip(names, ["length", "kv_corruption", "kv_corruption"], strict=True))
    assert {finding.step for finding in engine.canary.findings} == {6}


def test_whose_ancestors_a_branch_should_read_is_recorded(make, tmp_path):
    """A dump of captured drafts has what the device compared: the same chain breaks, and both branches of each."""
    with arm("draft.columns_never_regathered"):
        engine = make(ring=16, topk=3, num_steps=4, num_draft_tokens=8)
    dump = read_dump(engine.canary.dump(tmp_path / "found.kvdump"))
    outcome = replay(dump)
    found, reached = (
        [(f.code, f.slot, f.site, f.expected) for f in findings]
        for findings in (engine.canary.findings, outcome.findings)
    )
    assert {code for code, *_ in found} == {"R5"}
    assert reached == found
    assert outcome.missing == []
