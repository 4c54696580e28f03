"""Ancestors against columns, retractions by estimate, the price of host checks: small runs, and what is stated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcanary import invariants
from kvcanary.recorder.recorder import Recorder
from kvcanary_tools.bench import common
from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.embedded import ancestors, engine, host_checks, recorder, retractions
from spec_engine.step import runner

PROMPTS = ["def add(a, b):\n    return a", "for i in range(10):\n    print("]


def stated(name: str) -> dict:
    """A committed result; it names its machine."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert {"device", "threads", "torch", "kvcanary"} <= result["machine"].keys()
    return result


def test_ancestors_cost_no_acceptance() -> None:
    """Over 20,000 tokens at topk 4 and 8, exact drafting accepts at most 1 % less than drafting by columns."""
    rows = stated("ancestors")["rows"]
    assert [row["topk"] for row in rows] == [4, 8]
    for row in rows:
        assert row["tokens"] >= 20_000
        assert row["ancestors"] >= 0.99 * row["columns"]


def test_ancestors_and_columns_are_two_ways_to_draft(monkeypatch) -> None:
    """A small run measures both, over the same tokens."""
    monkeypatch.setattr(ancestors, "TOPK", (4,))
    (row,) = ancestors.measure(PROMPTS, new_tokens=9)["rows"]
    assert row["tokens"] == 16
    assert min(row["ancestors"], row["columns"]) > 1
    assert ancestors.make_engine(4, "columns").config.attend == "columns"


def test_the_worst_case_retracts_needlessly() -> None:
    """On the stated workload it retracts many times as often as the tight estimate, and prefills more."""
    rows = {(row["schedule"], row["estimate"]): row for row in stated("retractions")["rows"]}
    for schedule in ("sync", "overlap"):
        tight, worst = rows[schedule, "tight"], rows[schedule, "worst case"]
        assert worst["retractions"] > 10 * tight["retractions"] > 0
        assert worst["prefill_tokens"] > tight["prefill_tokens"]


def test_a_small_pressed_run_has_all_estimates() -> None:
    """Each estimate has its row, with its reserve; outputs are compared on the way."""
    result = retractions.measure(PROMPTS, new_tokens=4, slots=1024)
    assert [row["estimate"] for row in result["rows"]] == ["tight", "worst case", "doubled reserve"] * 2
    assert [row["reserve"] for row in result["rows"][::3]] == [128, 134]


def test_checks_cost_at_most_one_percent_of_a_step() -> None:
    """The stated share of the step is within what is allowed; the share without the models is stated beside it."""
    for row in stated("host_checks")["rows"]:
        assert 0 < row["percent_of_step"] <= host_checks.ALLOWED_PERCENT
        assert row["percent_without_models"] > row["percent_of_step"]


def test_every_check_is_timed_and_put_back() -> None:
    """A module's own import of a check is replaced while time is kept, and the check itself afterwards."""
    row = host_checks.run(PROMPTS[:1], 6, 1)
    assert row["checks_per_step"] > 10
    assert runner.check_window is invariants.check_window
    clock = host_checks.Clock()
    with host_checks.timed_checks(clock), pytest.raises(invariants.BranchLayoutError):
        runner.check_window("req-0", 3, 4, 6)
    assert clock.calls == 1
    assert runner.check_window is invariants.check_window


@pytest.mark.parametrize("path", sorted(common.RESULTS.glob("*_recorder.json")), ids=lambda path: path.stem)
def test_the_recorder_costs_at_most_one_percent_of_a_step(path: Path) -> None:
    """The stated share, checkpoints included, and the bytes of a full ring are within what is allowed."""
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        assert row["percent_of_median_step"] <= recorder.ALLOWED_PERCENT
        assert row["percent_of_checkpoints"] <= row["percent_of_median_step"]
        assert 0 < row["bytes"] <= recorder.ALLOWED_BYTES


def test_the_recorder_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some turns record, one of them with a checkpoint among its steps; the ring is filled at the end."""
    begun = []
    begin = Recorder.begin_segment
    monkeypatch.setattr(Recorder, "begin_segment", lambda own, step: begun.append(step) or begin(own, step))
    row = recorder.on_cpu(1, rounds=2, ring=4)
    assert min(row["step_ms"], row["bytes"]) > 0
    assert len(begun) == 1 + 2 * 3 + 1  # armed; on, with a checkpoint and one more behind the fifth step; the ring


def test_the_whole_engine_is_measured_with_and_without_drafting_and_canary(monkeypatch, tmp_path, capsys) -> None:
    """A small run on the CPU: speeds, speed-ups and costs of each batch size, in the table and in the JSON."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "NEW_TOKENS", 8)
    for name, value in {"PROMPTS": 2, "PASSES": 1, "BATCH_SIZES": (2,)}.items():
        monkeypatch.setattr(engine, name, value)
    engine.main("cpu")
    (row,) = json.loads((tmp_path / "cpu_engine.json").read_text(encoding="utf-8"))["rows"]
    assert row["accepted_length"] > 1
    assert (row["schedule"], row["batch"], row["drafting"]) == ("sync", 2, {})
    for measured in (row["tokens_per_second"], row["tokens_per_second_canary"], row["canary"], row["certificates"]):
        assert measured.keys() == {"none", "drafting"}
    assert min(*row["tokens_per_second"].values(), *row["tokens_per_second_canary"].values()) > 0
    assert row["speedup"].keys() == {"off", "on"}
    assert all(certificate["findings"] == [] for certificate in row["certificates"].values())
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["schedule", "sync"]
