"""Hooks that fail: in mode log no request ends for it, and what is no longer watched says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

transformers = pytest.importorskip("transformers")
from kvcanary import CanaryConfig  # noqa: E402
from kvcanary.adapters import vllm as plugin  # noqa: E402
from kvcanary.adapters.hosted.guard import Guard  # noqa: E402
from kvcanary.adapters.hosted.replacements import Replacements  # noqa: E402
from kvcanary.adapters.transformers import attach  # noqa: E402
from kvcanary_tools.bench.transformers_clean import generate_batch  # noqa: E402

from .served import go_on, load, without  # noqa: E402


class Engine:
    """Counts its own steps."""

    steps = 0

    def step(self, tokens: int) -> int:
        self.steps += 1
        if tokens < 0:
            raise ValueError("tokens of the engine")
        return self.steps * tokens


def fail_before(method: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("ours, before")


def fail_behind(method: Any, *args: Any, **kwargs: Any) -> Any:
    method(*args, **kwargs)
    raise RuntimeError("ours, behind")


def pass_on(method: Any, *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


def guarded(wrapper: Any, mode: str = "log", is_serving: bool = True, **others: Any) -> tuple[Engine, Guard]:
    engine, guard = Engine(), Guard("somebody's", mode, **others)
    guard.is_serving = is_serving
    Replacements(guard).replace(engine, "step", wrapper)
    return engine, guard


@pytest.mark.parametrize("wrapper", [fail_before, fail_behind])
def test_the_engine_runs_once_and_goes_on(wrapper) -> None:
    """What the hook stands around runs once in this call and once in the next, whether it had run or not."""
    told: list[str] = []
    engine, guard = guarded(wrapper, on_stop=told.append)
    with capture_logs() as events:
        assert [engine.step(10), engine.step(10)] == [10, 20]
    reason = f"RuntimeError in step: ours, {wrapper.__name__.removeprefix('fail_')}"
    assert (guard.stopped, told) == (reason, [reason])
    [event] = events
    assert (event["event"], event["log_level"], event["reason"]) == ("kvcanary.stopped", "error", reason)
    assert event["exception"].startswith("Traceback")
    assert f"in {wrapper.__name__}" in event["exception"]


def test_what_the_engine_raises_is_the_engines() -> None:
    """Its error passes as it is, through two hooks too, and the canary goes on."""
    engine, guard = guarded(pass_on)
    Replacements(guard).replace(engine, "step", pass_on)
    with pytest.raises(ValueError, match="tokens of the engine"):
        engine.step(-1)
    assert (guard.stopped, engine.steps) == ("", 1)


@pytest.mark.parametrize(("mode", "is_serving"), [("raise", True), ("log", False)])
def test_other_modes_and_the_start_raise(mode: str, is_serving: bool) -> None:
    """In mode raise a hook that fails ends the step; before anything is served it ends the start, in every mode."""
    engine, guard = guarded(fail_before, mode, is_serving)
    with pytest.raises(RuntimeError, match="ours, before"):
        engine.step(1)
    with pytest.raises(RuntimeError, match="ours"):
        guard.run(fail_before, None)
    assert not guard.stopped


def test_parts_stop_with_the_whole_and_not_the_other_way() -> None:
    """One pool stops alone; what stands around all of them stops them all, and is told once."""
    parts = [Guard("somebody's", "log") for _ in range(2)]
    whole = Guard("somebody's", "log", parts=parts)
    for guard in (*parts, whole):
        guard.is_serving = True
    with capture_logs() as events:
        assert parts[0].run(fail_before, None) is None
        assert [bool(guard.stopped) for guard in (*parts, whole)] == [True, False, False]
        whole.run(fail_behind, bool)
        parts[1].run(fail_before, None)
    assert [bool(guard.stopped) for guard in (*parts, whole)] == [True, True, True]
    assert len(events) == 2


# in the adapters

OF_A_WORKER = ("canary.read", "canary.wrote", "canary.count_at", "canary.admit", "canary.leave", "_look_at")


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a defect of ours")


@pytest.mark.parametrize("runner", ["v2", "v1"])
@pytest.mark.parametrize("name", OF_A_WORKER)
def test_a_vllm_worker_serves_on(serve, monkeypatch, name: str, runner: str) -> None:
    """Whatever of ours fails, and wherever: the same tokens, one event, and a certificate that says since when."""
    monkeypatch.setenv("KVCANARY_MODE", "log")
    settings = {"settings": {"runner": runner}}
    bare = without(**settings)
    load(bare)
    expected = bare.run()
    plugin.register()
    served = serve(**settings)
    handle = served.wrapper.worker.kvcanary
    load(served)
    go_on(served, 3)
    owner, _, last = name.rpartition(".")
    monkeypatch.setattr(handle.canary if owner else handle, last, broken)
    with capture_logs() as events:
        assert served.run() == expected
        report = served.wrapper.kvcanary_report()
    stopped = [event for event in events if event["event"] == "kvcanary.stopped"]
    assert [event["host"] for event in stopped] == ["vllm"]
    assert not report["armed"]
    [reason] = report["unchecked"]
    assert reason.startswith("stopped watching: RuntimeError in ")
    assert reason.endswith(": a defect of ours")


def test_a_vllm_worker_in_mode_raise_ends(serve, monkeypatch) -> None:
    """Nobody may take a canary that is broken for a clean step."""
    served = serve()
    load(served)
    go_on(served, 3)
    monkeypatch.setattr(served.wrapper.worker.kvcanary.canary, "read", broken)
    with pytest.raises(RuntimeError, match="a defect of ours"):
        served.run()


def test_prometheus_says_whether_a_worker_is_watched(serve, monkeypatch) -> None:
    """The gauge is 1 from the start to the first failure, then 0."""
    from prometheus_client import REGISTRY

    def gauge() -> float | None:
        return REGISTRY.get_sample_value("kvcanary_watching", {"engine": "vllm", "pool": "all", "rank": "0"})

    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = serve()
    load(served)
    go_on(served, 3)
    assert gauge() == 1
    monkeypatch.setattr(served.wrapper.worker.kvcanary.canary, "read", broken)
    go_on(served, 1)
    assert gauge() == 0


@pytest.mark.parametrize("name", ["stored", "fed", "expect", "reread_all"])
def test_a_generate_of_transformers_goes_on(models, generate, monkeypatch, name: str) -> None:
    """The same tokens, one event, and the certificate says why; in mode raise the error leaves."""
    from kvcanary.adapters.transformers.dense_cache import DenseRows

    model = models("Llama")
    expected = generate(model, "greedy")
    monkeypatch.setattr(DenseRows, name, broken)
    with attach(model, CanaryConfig(mode="log", content="full", seed=7)) as handle, capture_logs() as events:
        assert torch.equal(generate(model, "greedy"), expected)
        [reason] = handle.certificate()["unchecked"]
    assert reason.startswith("stopped watching: RuntimeError in ")
    assert [event["event"] for event in events] == ["kvcanary.stopped"]
    with attach(model, CanaryConfig(mode="raise", content="full", seed=7)), pytest.raises(RuntimeError, match="ours"):
        generate(model, "greedy")


@pytest.mark.parametrize("name", ["selected", "cropped"])
def test_rows_that_move_in_transformers_go_on(models, generate, monkeypatch, name: str) -> None:
    """Beams reorder rows, and an assistant's tokens are cropped: neither ends for us."""
    from kvcanary.adapters.transformers.dense_cache import DenseRows

    model, way = models("Llama"), {"selected": "beams", "cropped": "assisted"}[name]
    expected = generate(model, way)
    monkeypatch.setattr(DenseRows, name, broken)
    with attach(model, CanaryConfig(mode="log", content="full", seed=7)) as handle, capture_logs() as events:
        assert torch.equal(generate(model, way), expected)
        assert len(handle.certificate()["unchecked"]) == 1
    assert [event["event"] for event in events] == ["kvcanary.stopped"]


@pytest.mark.parametrize("name", ["placed", "before", "stored", "copied", "freed"])
def test_a_batch_of_transformers_goes_on(models, monkeypatch, name: str) -> None:
    """Its requests run in a thread that an error would end for all of them."""
    from kvcanary.adapters.transformers.paged_cache import BatchedCache

    model = models("Llama", batched=True)
    expected = generate_batch(model, 3)
    monkeypatch.setattr(BatchedCache, name, broken)
    with attach(model, CanaryConfig(mode="log", content="full", seed=7)) as handle, capture_logs() as events:
        assert generate_batch(model, 3) == expected
        assert len(handle.certificate()["unchecked"]) == 1
    assert [event["event"] for event in events] == ["kvcanary.stopped"]
