"""The bench of vLLM's hooks: a canary that stops would cost nothing, so its time is not taken."""

from __future__ import annotations

import click
import pytest

from kvcanary_tools.bench.vllm.hooks import run
from kvcanary_tools.bench.vllm.hooks.bare_runner import outputs


def test_every_kind_of_step_is_timed_under_a_canary_that_runs() -> None:
    spent = run.timed("cpu", steps=12, every=5, rest_ms=0.0, content="rolling")
    for own in spent:
        assert {kind: len(us) for kind, us in own.items()} == {"arriving": 3, "settling": 3, "quiet": 5}


def test_a_canary_that_stops_is_not_timed(monkeypatch) -> None:
    """mode log goes on unwatched: requests here lack what a hook asks for."""

    def lacking(seed: int, every: int):
        for kind, output in outputs(seed, every):
            for new in output.scheduled_new_reqs:
                del new.mm_features
            yield kind, output

    monkeypatch.setattr(run, "outputs", lacking)
    with pytest.raises(click.ClickException, match="the canary stopped: AttributeError"):
        run.timed("cpu", steps=3, every=5, rest_ms=0.0, content="rolling")
