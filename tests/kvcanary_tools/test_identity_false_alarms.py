"""Weights, adapters and images in right traffic: a sample of the run whose record is committed, and its controls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcanary import KVCorruptionError
from kvcanary_tools.bench.toy import identity_false_alarms
from kvcanary_tools.bench.toy.identity_false_alarms import Traffic

ROOT = Path(__file__).resolve().parents[2]
HAPPENS = (
    "with_images", "hits", "kept_in_flight", "computed_again", "ends_of_a_mix", "adapter_loads",
    "versions_that_came_back",
)  # fmt: skip


def test_right_traffic_has_no_finding(tmp_path, capsys):
    """All of it happens, and is judged."""
    path = tmp_path / "alarms.json"
    identity_false_alarms.main(["--updates", "100", "--seed", "1", "--json", str(path)])
    result = json.loads(path.read_text())
    assert (result["findings"], result["updates"]) == (0, 100)
    for phase in result["phases"]:
        assert min(phase[name] for name in HAPPENS) > 0
    assert "100 updates" in capsys.readouterr().out


@pytest.mark.parametrize("forgets", ["weights", "images"])
def test_a_cache_that_forgets_one_of_them_ends_the_run(forgets):
    """The same traffic, and pages that are found under less than what they are."""
    traffic = Traffic("rolling", 1, forgets=forgets)
    with pytest.raises(KVCorruptionError) as caught:
        go_on(traffic)
    assert caught.value.findings[0].code in ("R5", "R6")


def test_who_is_not_kept_must_compute_again(monkeypatch):
    """A row in flight that nobody named goes on over what the weights before have computed."""
    monkeypatch.setattr(identity_false_alarms.FlavouredEngine, "preempt", lambda self, name: None)
    monkeypatch.setattr(identity_false_alarms.FlavouredEngine, "prefill", _prefill_of_new_rows)
    traffic = Traffic("rolling", 1)
    with pytest.raises(KVCorruptionError) as caught:
        go_on(traffic)
    assert caught.value.findings[0].code in ("R5", "R6")


def go_on(traffic):
    for _ in range(100):
        traffic.run()


_prefill = identity_false_alarms.FlavouredEngine.prefill


def _prefill_of_new_rows(self, name):
    if not self.lengths.get(name):
        _prefill(self, name)


def test_the_record_is_that_of_a_thousand_updates():
    """Committed: what the whole run gave."""
    path = ROOT / "tools" / "kvcanary_tools" / "bench" / "results" / "identity_false_alarms.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["findings"] == 0
    assert record["updates"] >= 1000
    assert all(phase[name] > 0 for phase in record["phases"] for name in HAPPENS)
