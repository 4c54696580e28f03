"""The bench of vLLM's hooks: a canary that stops would cost nothing, so its time is not taken."""

from __future__ import annotations

import time
from types import SimpleNamespace

import click
import pytest
import torch

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary_tools.bench.vllm.hooks import run
from kvcanary_tools.bench.vllm.hooks.bare_runner import BareRunner, BareWorker, outputs


def test_every_kind_of_step_is_timed_under_a_canary_that_runs() -> None:
    spent = run.timed("cpu", steps=12, every=5, rest_ms=0.0, content="rolling")
    for own in spent:
        assert {kind: len(us) for kind, us in own.items()} == {"arriving": 3, "settling": 3, "quiet": 5}


def test_the_device_ends_before_tokens_are_asked_for(monkeypatch) -> None:
    """As in a server, whose model takes it longer than the canary; what it takes is not the host's time."""
    done = []

    def takes(name: str, seconds: float = 0.0):
        def call(*_):
            done.append(name)
            time.sleep(seconds)
            return SimpleNamespace(get_output=takes("get_output"))

        return call

    monkeypatch.setattr(torch.cuda, "synchronize", takes("device", 0.2))
    runner = SimpleNamespace(
        device=torch.device("cuda"), execute_model=takes("execute"), sample_tokens=takes("sample", 0.01)
    )
    assert 10_000 <= run.step_us(runner, None) < 200_000
    assert done == ["execute", "sample", "device", "get_output"]


def test_a_canary_that_waits_for_the_device_is_not_timed(monkeypatch) -> None:
    inner = PagedCanary.count_at

    def waits(canary: PagedCanary, step: int) -> int:
        canary.waits += 1
        return inner(canary, step)

    monkeypatch.setattr(PagedCanary, "count_at", waits)
    with pytest.raises(click.ClickException, match="3 steps waited for the device"):
        run.timed("cpu", steps=3, every=5, rest_ms=0.0, content="rolling")


def test_reports_are_not_timed(monkeypatch) -> None:
    """A runner that keeps other tokens of a prompt than it was given."""
    monkeypatch.setattr(BareRunner, "update_requests", lambda self, _: self.req_states.all_token_ids.gpu.fill_(3))
    with pytest.raises(click.ClickException, match="of 3 steps some were found wrong"):
        run.timed("cpu", steps=3, every=5, rest_ms=0.0, content="rolling")


@pytest.mark.gpu
def test_the_floor_is_launches_and_a_counter() -> None:
    """It launches what the canary does in a step, as often, and no finding, token or table is looked at."""
    worker, planned = BareWorker("cuda"), outputs(7, 5)
    run.launch_alone(worker, planned, 20, "rolling")
    with torch.profiler.profile() as profile:
        for _ in range(4):
            run.step_us(worker.model_runner, next(planned)[1])
    assert len([event for event in profile.events() if event.name == "cuGraphLaunch"]) == 8


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
