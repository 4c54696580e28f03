"""A drill: one bit flipped in a request of the server's own; found, silent or refused, and nobody else's business."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from kvcanary_tools.campaign.fault_target import target_of
from kvcanary_tools.cli import main

from .conftest import KEY
from .test_corruption import PROMPTS, Client


@pytest.fixture
def kvcanary() -> Callable[..., Result]:
    """The command, in this process."""
    return lambda *arguments: CliRunner().invoke(main, list(arguments), prog_name="kvcanary")


@pytest.mark.parametrize(("canary", "content"), [("abort", "full"), ("log", "rolling")])
def test_a_drill_is_found_and_touches_nobody(start, kvcanary, canary: str, content: str) -> None:
    """The finding is in the drill's own request: clients end as they would, and the joined incidents leave it out."""
    server = start(canary, content, allow_faults=True, target_of=target_of)
    client = Client(server, PROMPTS[0], 100)
    with capture_logs() as events:  # else they stand on the same stdout
        result = kvcanary("drill", server.url, "--api-key", KEY, "--json")
    assert "kvcanary.finding" in [event["event"] for event in events]
    assert result.exit_code == 0
    told = json.loads(result.stdout)[server.url]
    assert (told["result"], told["finding"]["code"]) == ("found", "R9")
    assert told["finding"]["hardware"]["pid"] > 0
    client.join(60)
    assert client.reason == "length"
    assert server.get("/debug/kvcanary/incidents").json() == []
    assert server.get("/debug/kvcanary/findings").json() != []
    assert "kvcanary_drills_total{" in (metrics := server.get("/metrics").text)
    assert 'result="found"} 1.0' in metrics
    assert "kvcanary_bit_errors_total{" in metrics
    assert not re.search(r"kvcanary_(bit_errors|incidents)_total\{.*\} [1-9]", metrics)  # nobody is paged


def test_silence_is_a_failure(start, kvcanary) -> None:
    """A canary that compares no bytes lets the bit pass: exit code 1, and loud."""
    server = start("log", "write", allow_faults=True, target_of=target_of)
    result = kvcanary("drill", server.url, "--api-key", KEY)
    assert result.exit_code == 1
    assert "silent" in result.stdout
    assert f"DRILL FAILED at {server.url}" in result.stderr


def test_a_bit_that_was_not_flipped_is_no_success(start, kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drill's request ended before it could be struck."""
    monkeypatch.setattr("spec_engine.server.worker.EngineWorker.request_of", lambda worker, job: None)
    server = start("log", allow_faults=True, target_of=target_of)
    assert kvcanary("drill", server.url, "--api-key", KEY).exit_code == 1
    assert server.server.worker.drills == {"not made": 1}


@pytest.mark.parametrize(
    ("mode", "options", "sentence"),
    [
        ("raise", {"allow_faults": True}, "mode raise stops the server at a finding"),
        ("off", {"allow_faults": True}, "nothing is watched here"),
        ("log", {"debug": True}, "Not Found"),
    ],
)
def test_who_takes_no_drill_says_why(start, kvcanary, mode: str, options: dict, sentence: str) -> None:
    """Exit code 2; and nothing was sent to the engine."""
    server = start(mode, target_of=target_of, **options)
    result = kvcanary("drill", server.url, "--api-key", KEY)
    assert result.exit_code == 2
    assert sentence.lower() in result.stderr.lower()
    assert server.engine.metrics.num_steps == 0


def test_a_drill_needs_the_key_as_a_bearer_token(start) -> None:
    """As arming a fault does: no page of a browser can start one."""
    server = start("log", allow_faults=True, target_of=target_of)
    assert server.post("/debug/kvcanary/drill", None, key=None).status_code == 401
    basic = {"Authorization": "Basic eDphLXNlY3JldA=="}
    assert server.post("/debug/kvcanary/drill", None, headers=basic).status_code == 403
