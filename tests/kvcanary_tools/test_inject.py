"""`kvcanary inject` and `kvcanary faults show`: the matrix, the files, the exit codes, and one fault's story."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

KEYS = {
    "fault",
    "config",
    "runs",
    "found",
    "not_ended",
    "first_code",
    "expected_code",
    "place_right",
    "writer_right",
    "steps_to_detection",
    "tokens_leaked",
    "tokens_exposed",
    "twin_findings",
    "verdict_rank",
}


def test_a_fault_that_is_found_exits_0(kvcanary, tmp_path) -> None:
    """One line a fault on stdout, a row a configuration in the JSON, a test case in the JUnit file."""
    matrix, junit = tmp_path / "matrix.json", tmp_path / "junit.xml"
    result = kvcanary("inject", "bits.flip", "--workers", "1", "--json", str(matrix), "--junit", str(junit))
    assert result.exit_code == 0
    head, line = result.stdout.splitlines()
    assert head.split()[:6] == ["fault", "runs", "found", "not", "ended", "by"]
    assert line.split()[:5] == ["bits.flip", "3", "3", "0", "R9"]
    written = json.loads(matrix.read_text())
    assert written["meta"]["config"] == "quick"
    assert [row["runs"] for row in written["rows"]] == [1, 1, 1]
    assert all(row.keys() >= KEYS and row["steps_to_detection"].keys() == {"median", "max"} for row in written["rows"])
    suite = ElementTree.parse(junit).getroot()
    assert [(case.get("classname"), case.get("name")) for case in suite] == [("kvcanary.faults.bits", "flip")]
    assert suite.get("failures") == "0"


def test_a_fault_that_is_missed_exits_1(kvcanary, tmp_path, monkeypatch) -> None:
    """With what to run again on stderr, and a failure in the JUnit file."""
    from kvcanary_tools.campaign import traffic

    monkeypatch.setattr(traffic, "CODES", {})
    monkeypatch.setattr(traffic, "CanaryConfig", lambda **more: _blind(more))
    result = kvcanary("inject", "bits.flip", "--runs", "1", "--workers", "1", "--junit", str(tmp_path / "junit.xml"))
    assert result.exit_code == 1
    assert "bits.flip, faulty, p4-k2-t3, seed 1: nothing fired" in result.stderr
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("failures") == "1"


def _blind(settings: dict) -> object:
    from kvcanary import CanaryConfig

    return CanaryConfig(**(settings | {"disable": frozenset({"R9"})}))


def test_json_to_stdout_stands_alone(kvcanary) -> None:
    """`--json -`: the matrix goes to stderr, so that stdout can be piped."""
    result = kvcanary("inject", "hooks.wrong_substep", "--runs", "1", "--workers", "1", "--json", "-")
    assert json.loads(result.stdout)["rows"][0]["found"] == 1
    assert "hooks.wrong_substep" in result.stderr


def test_a_record_takes_a_fault_in(kvcanary, tmp_path) -> None:
    """`--into`: its rows are the new ones, and `meta.rerun` says so; a record of another config is refused at once."""
    record = tmp_path / "record.json"
    assert kvcanary("inject", "hooks", "--workers", "1", "--json", str(record)).exit_code == 0
    before = json.loads(record.read_text())
    again = kvcanary("inject", "hooks.wrong_substep", "--workers", "1", "--seed", "3", "--into", str(record))
    assert again.exit_code == 0
    after = json.loads(record.read_text())
    assert [row["fault"] for row in after["totals"]] == [row["fault"] for row in before["totals"]]
    [rerun] = after["meta"]["rerun"]
    assert (rerun["faults"], rerun["seed"]) == (["hooks.wrong_substep"], 3)
    assert after["meta"]["num_runs"]["faulty"] == before["meta"]["num_runs"]["faulty"] + 3
    refused = kvcanary("inject", "hooks.wrong_substep", "--config", "full", "--into", str(record))
    assert refused.exit_code == 2
    assert "complete and of config full" in refused.stderr


@pytest.mark.parametrize(("name", "hint"), [("bits.flop", "bits.flip"), ("addressing.beams_reordered", "kvcanary")])
def test_what_cannot_be_run_is_wrong_usage(kvcanary, name: str, hint: str) -> None:
    """An unknown name gets the closest ones, a pending fault the way to its reason."""
    result = kvcanary("inject", name)
    assert result.exit_code == 2
    assert hint in result.stderr


def test_a_room_tells_and_shows(kvcanary) -> None:
    """Story, bugs, what a user would see, what the canary says, and the report."""
    result = kvcanary("faults", "show", "draft.position_off_by_one")
    assert result.exit_code == 0
    for text in ("Positions were raised before each draft forward", "sgl-project/sglang#25015", "accepted length"):
        assert text in result.stdout
    assert "found       W5, as expected" in result.stdout
    assert "ERROR: write position (W5): draft pool" in result.stdout


def test_a_room_shows_retractions(kvcanary) -> None:
    """What an estimate costs without a canary, and the error in which it ends with one."""
    result = kvcanary("faults", "show", "lengths.worst_case_estimate")
    assert result.exit_code == 0
    assert re.search(r"unwatched +0 of 9 answers differ, and no error; .*; retractions 1, now \d\d", result.stdout)
    assert "found       StalledError, as expected" in result.stdout
    assert "otherwise   needless retractions and the same tokens" in result.stdout


def test_a_room_as_json(kvcanary) -> None:
    """The entry, and what came of it; a pending fault has no room."""
    room = json.loads(kvcanary("faults", "show", "bits.flip", "--json").stdout)["room"]
    assert room["is_right"]
    assert room["verdict"] == "R9, as expected"
    assert json.loads(kvcanary("faults", "show", "addressing.beams_reordered", "--json").stdout)["room"] is None
