"""Dumps of earlier versions: every command that reads one says of them what the version said that wrote them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

DUMPS = Path(__file__).resolve().parents[1] / "data" / "dumps"
#: By dump, what the version that wrote it says: `answers_of` of each, made with that version.
ANSWERS: dict[str, Any] = json.loads((DUMPS / "answers.json").read_text())
PLACE = ("code", "pool", "layer", "slot", "position", "step", "site", "reader", "writer", "write_step", "part", "bit")
SUMMARY = ("step", "first_step", "tokens", "content", "page_size", "pages", "pools", "forwards", "requests", "config")
SOMEWHERE = {"pool": "target", "slot": 8}

Command = Callable[..., Result]


def answers_of(kvcanary: Command, path: str, trace: Path) -> dict[str, Any]:
    """What must stay: codes, places, causes and counts. Sentences, and the names of events, may be put better."""
    summary = _said(kvcanary("inspect", path, "--json"))
    again = _said(kvcanary("replay", path, "--json"))
    answers = {
        "inspect": {key: summary[key] for key in SUMMARY} | {"events": sum(summary["events"].values())},
        "replay": {key: again[key] for key in ("step", "events", "same", "first_bad_step", "missing", "errors")}
        | {"findings": [_finding(finding) for finding in again["findings"]]},
        "timeline": _trace(kvcanary, path, trace),
        "why-slot": _slot(kvcanary, path, (summary["findings"] or [SOMEWHERE])[0]),
    }
    if summary["findings"]:
        story = _said(kvcanary("explain", path, "--json"))
        answers["explain"] = _finding(story["finding"]) | {"story": _steps(story["story"]), "steps": len(story["next"])}
    return answers


def _said(result: Result) -> dict[str, Any]:
    assert result.exit_code in (0, 1), result.output
    reported: dict[str, Any] = json.loads(result.stdout)
    return reported


def _finding(finding: dict[str, Any]) -> dict[str, Any]:
    return {key: finding[key] for key in PLACE} | {"cause": finding["causes"][0]["family"]}


def _steps(story: list[dict[str, Any]]) -> list[list[Any]]:
    return [[line["step"], line["kind"]] for line in story]


def _trace(kvcanary: Command, path: str, trace: Path) -> dict[str, Any]:
    """How many events of each phase, and the forwards and findings by name."""
    assert kvcanary("timeline", path, "-o", str(trace)).exit_code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    named = Counter(event["name"] for event in events if event.get("cat") == "forward" or event["ph"] == "i")
    return {"phases": Counter(event["ph"] for event in events), "named": named}


def _slot(kvcanary: Command, path: str, place: dict[str, Any]) -> dict[str, Any]:
    reported = _said(kvcanary("why-slot", path, str(place["slot"]), "--pool", place["pool"], "--json"))
    return reported | {"story": _steps(reported["story"])}


def test_every_dump_has_its_answers() -> None:
    """Of both versions, and none without."""
    found = {path.relative_to(DUMPS).as_posix() for path in DUMPS.rglob("*.kvdump")}
    assert found == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_dump_of_an_earlier_version_says_what_it_said(kvcanary: Command, tmp_path: Path, name: str) -> None:
    """The same finding at the same place with the same first cause, and a replay that reaches it."""
    reported = answers_of(kvcanary, str(DUMPS / name), tmp_path / "trace.json")
    assert reported["replay"]["same"]
    assert reported == ANSWERS[name]


def test_dumps_of_two_versions_are_compared(kvcanary: Command) -> None:
    """One is the same as itself; of the same run the later one says more: which forwards to expect."""
    earlier, later = (str(DUMPS / version / "captured.pages_exchanged.kvdump") for version in ("3b0998d", "897285c"))
    assert kvcanary("diff", later, later).exit_code == 0
    parted = kvcanary("diff", earlier, later, "--json")
    assert parted.exit_code == 1
    reported = json.loads(parted.stdout)
    assert (reported["step"], reported["first"]["call"]) == (1, "forward")
