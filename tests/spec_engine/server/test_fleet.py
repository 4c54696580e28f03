"""`kvcanary fleet` over running servers: sums, what was found where, and who has no turn or takes no questions."""

from __future__ import annotations

import json
import os

import click
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from kvcanary_tools.cli import main
from kvcanary_tools.engine_options import engine_config
from spec_engine.server.inspection import observing

from .conftest import KEY
from .test_corruption import strike

NOBODY = 1e-9  # a share in which no worker has a turn


def test_two_servers_are_one_certificate(start) -> None:
    """One is damaged: the fleet says which code on whose GPU, and the same to a machine; blame finds nobody so far."""
    sound, damaged = (start("log", debug=True) for _ in range(2))
    strike(damaged)
    asked = ["fleet", sound.url, damaged.url, "--api-key", KEY]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 1
    assert "2 of 2 members watched" in result.stdout
    assert "R9 (bits) at " in result.stdout
    assert damaged.url in result.stdout.splitlines()[-1]
    told = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)
    certificates = [server.between_steps(observing.certificate_of) for server in (sound, damaged)]
    assert told["sums"]["slots_checked"] == sum(own["slots_checked"] for own in certificates) > 0
    assert told["sums"]["bit_errors"] == 1
    assert told["incidents"][0]["gpus"] == [f"{certificates[0]['hardware']['hostname']}/{os.getpid()}"]
    blamed = CliRunner().invoke(main, ["fleet", "blame", sound.url, damaged.url, "--api-key", KEY])
    assert blamed.exit_code == 0
    assert blamed.stdout == "nobody stands out\n1 isolated: heal\n"


@pytest.mark.parametrize(("key", "options", "reason"), [("wrong", {"debug": True}, "401"), (KEY, {}, "404")])
def test_a_member_that_takes_no_questions_is_named(start, key: str, options: dict, reason: str) -> None:
    """With what it wants; the fleet is not whole."""
    server = start("log", **options)
    result = CliRunner().invoke(main, ["fleet", server.url, "--api-key", key])
    assert result.exit_code == 1
    assert f"unreachable  {server.url}: {reason}" in result.stdout


def test_an_engine_without_a_turn_has_no_canary_and_says_so(start) -> None:
    """It serves all the same; log, metrics and certificate say that it is not watched, and the fleet shows why."""
    with capture_logs() as events:
        server = start("log", debug=True, share=NOBODY)
    assert [event["watched"] for event in events if event["event"] == "kvcanary.turn"] == [False]
    body = {"model": "toy", "prompt": list(range(5, 25)), "max_tokens": 4}
    assert server.post("/v1/completions", body).status_code == 200
    assert 'kvcanary_mode{content="off",mode="off"' in server.get("/metrics").text
    told = server.get("/debug/kvcanary/certificate").json()
    assert (told["mode"], told["turn"]["share"]) == ("off", NOBODY)
    result = CliRunner().invoke(main, ["fleet", server.url, "--api-key", KEY])
    assert result.exit_code == 1
    assert f"not watched  {server.url}: no turn in {told['turn']['week']}, share {NOBODY}" in result.stdout


def test_the_share_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every command that has an engine, as inside other engines."""
    monkeypatch.setenv("KVCANARY_SHARE", "0.5")
    command = main.get_command(click.Context(main), "generate")
    with command.make_context("generate", ["--prompt", "x", "--kv-canary", "log"]) as context:
        assert engine_config(context.params).canary.share == 0.5
