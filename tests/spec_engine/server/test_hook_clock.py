"""HookClock: hooks of hooks count once, reads do not count, and what was wrapped is as it was."""

from __future__ import annotations

import time

import pytest

from kvcanary import CanaryConfig
from kvcanary.manager.hook_clock import HookClock
from spec_engine import Engine, EngineConfig, SamplingParams


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(max_total_tokens=512, canary=CanaryConfig(mode="raise", seed=1)))


def test_the_time_in_hooks_is_a_part_of_the_steps(engine: Engine) -> None:
    """It grows with the steps, stays below them, and does not grow when the canary is only asked."""
    clock = HookClock(engine.canary)
    engine.generate(["def f("], SamplingParams(max_new_tokens=12, ignore_eos=True))
    seconds = clock.seconds
    assert 0 < seconds < engine.metrics.prefill_seconds + engine.metrics.decode_seconds
    engine.canary.certificate()
    engine.canary.page_map()
    assert clock.seconds == seconds
    clock.remove()
    assert "begin_step" not in vars(engine.canary)
    assert engine.canary.admit == engine.canary.lifecycle.admit
    engine.generate(["def g("], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert clock.seconds == seconds


def test_a_hook_that_calls_another_counts_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner one is a part of the outer one."""
    kind = type(engine.canary)
    monkeypatch.setattr(kind, "drain", lambda self: time.sleep(0.02))
    monkeypatch.setattr(kind, "rest", lambda self: self.drain())
    clock = HookClock(engine.canary)
    began = time.perf_counter()
    engine.canary.rest()
    assert 0.02 <= clock.seconds <= time.perf_counter() - began
    clock.remove()
