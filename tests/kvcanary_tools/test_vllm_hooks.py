"""The bench of vLLM's hooks: a canary that stops would cost nothing, so its time is not taken."""

from __future__ import annotations

import time
from types import SimpleNamespace

import click
import pytest
import torch

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.launches import Launches
from kvcanary.adapters.vllm.runner_v2 import HandleV2
from kvcanary_tools.bench.vllm.hooks import run
from kvcanary_tools.bench.vllm.hooks.bare_runner import BareWorker, outputs
from kvcanary_tools.bench.vllm.hooks.floor import FIRST_STEPS, floored


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
    """Where something was found, steps are longer than those of a sound runner."""
    monkeypatch.setattr(PagedCanary, "wrote", lambda self: self.memory.total.add_(1))
    with pytest.raises(click.ClickException, match="of 3 steps some were found wrong"):
        run.timed("cpu", steps=3, every=5, rest_ms=0.0, content="rolling")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_floor_launches_and_looks_and_does_nothing_else(monkeypatch, device: str) -> None:
    """From the first steps on; what is wrong then is nobody's, and a canary beside it judges as always."""
    done: list[str] = []
    of_launches, of_canary = ("again", "before", "after"), ("read", "read_again", "count_at")
    for owner, names in (Launches, of_launches), (PagedCanary, of_canary), (HandleV2, ("_look_at",)):
        for name in names:
            monkeypatch.setattr(owner, name, noted(getattr(owner, name), name, done))
    watching, planned = BareWorker(device), outputs(7, 5)
    with run.watched(watching, "rolling") as judging, floored():
        worker, own = BareWorker(device), outputs(7, 5)
        with run.watched(worker, "rolling") as handle:
            for _ in range(FIRST_STEPS):
                run.step_us(worker.model_runner, next(own)[1])
            worker.model_runner.req_states.all_token_ids.gpu.fill_(3)
            done.clear()
            for _ in range(6):
                run.step_us(worker.model_runner, next(own)[1])
            assert done == ["again", "after", "count_at"] * 6
            assert (handle.canary.log.findings, handle.guard.stopped) == ([], "")
        done.clear()
        run.step_us(watching.model_runner, next(planned)[1])
        assert done == ["read", "before", "after", "count_at", "_look_at"]
        assert judging.canary.step == 1


def test_the_floor_waits_for_a_step_of_decodes(monkeypatch) -> None:
    """What is launched again is such a step, however many of others come first."""
    done: list[str] = []
    for name in ("read", "read_again"):
        monkeypatch.setattr(PagedCanary, name, noted(getattr(PagedCanary, name), name, done))
    worker, arriving, quiet = BareWorker("cpu"), outputs(7, 1), outputs(7, 1000)
    with floored(), run.watched(worker, "rolling"):
        for _ in range(FIRST_STEPS + 3):
            run.step_us(worker.model_runner, next(arriving)[1])
    assert done == ["read"] * (FIRST_STEPS + 3)
    done.clear()
    worker = BareWorker("cpu")
    with floored(), run.watched(worker, "rolling"):
        for _ in range(FIRST_STEPS + 3):
            run.step_us(worker.model_runner, next(quiet)[1])
    assert len(done) == FIRST_STEPS


def noted(method, name: str, done: list[str]):
    def note(*args, **kwargs):
        done.append(name)
        return method(*args, **kwargs)

    return note


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
