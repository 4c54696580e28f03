"""Right traffic of recurrent states: a sample of the run whose record is committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcanary import KVCorruptionError
from kvcanary_tools.bench.toy import state_false_alarms

ROOT = Path(__file__).resolve().parents[2]


def test_right_traffic_has_no_finding(tmp_path, capsys):
    """Hits, rollbacks, offloads and preemption all happen, and everything is judged."""
    path = tmp_path / "alarms.json"
    state_false_alarms.main(["--checks", "4000", "--seed", "1", "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["findings"] == 0
    for phase in result["phases"]:
        assert phase["unchecked"] == {}
        assert min(phase[name] for name in ("hits", "rollbacks", "offloads", "preemptions", "evictions")) > 0
    assert "0 findings" in capsys.readouterr().out


def test_one_wrong_column_ends_the_run(monkeypatch):
    """The same traffic is no longer silent where a row goes on from the column behind the accepted one."""
    append = state_false_alarms.Traffic._append

    def wrong(traffic, row, tokens):
        append(traffic, row, tokens)
        if len(tokens) == 2:
            row.at += 1

    monkeypatch.setattr(state_false_alarms.Traffic, "_append", wrong)
    with pytest.raises(KVCorruptionError, match="another accepted count"):
        state_false_alarms.measure(4000)


def test_the_record_is_that_of_a_million_checks():
    """Committed: what the whole run gave."""
    path = ROOT / "tools" / "kvcanary_tools" / "bench" / "results" / "state_false_alarms.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["findings"] == 0
    assert record["states_checked"] >= 10**6
