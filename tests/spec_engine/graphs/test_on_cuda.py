"""Captured decode steps on a GPU: the CUDA graphs give what eager steps give, canary inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from held_memory import expect_memory_to_stay
from kvcanary.captured.in_flight import InFlight
from kvcanary.records.dispatch import KERNELS
from kvcanary_kernels.content import check, fingerprint, finite, poison
from kvcanary_kernels.content.check import check_content
from spec_engine import SamplingParams
from spec_engine.models.embedded import load_excerpts

pytestmark = pytest.mark.gpu
CYCLES = 50_000_000  # about 25 ms
PROMPTS = [excerpt.prompt[:80] for excerpt in load_excerpts()[20:23]]
SHAPES = [
    {"draft": "none"},
    {"topk": 1, "num_steps": 3},
    {"topk": 4, "num_steps": 4, "page_size": 4},
    {"topk": 2, "num_steps": 1, "page_size": 1},
    {"topk": 2, "num_steps": 3, "page_size": 4, "kv_cache_dtype": "fp8_e4m3"},
]


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_graphs_give_the_tokens_of_eager_steps(make, outcome, settings):
    """float32, three requests in a bucket of four; nothing fires, and as much is checked."""
    settings = settings | {"dtype": "float32", "device": "cuda"}
    plain, coverage = outcome(make(**settings), max_new_tokens=32)
    captured, own = outcome(make(graphs="on", **settings), max_new_tokens=32)
    assert captured == plain
    assert own == coverage


@pytest.mark.parametrize("settings", [{"draft": "none"}, {"topk": 1, "num_steps": 3}], ids=str)
def test_bytes_are_read_again_beside_what_is_launched_next(make, monkeypatch, settings):
    """The device is through with all that a step has launched while it still reads bytes behind it."""
    engine = make(graphs="on", schedule="overlap", device="cuda", **settings)
    depart, were_over = engine.canary.end_step, []

    def slow(*args, **kwargs) -> None:
        torch.cuda._sleep(CYCLES)
        check_content(*args, **kwargs)

    def timed(is_waited_for: bool = False) -> InFlight:
        flight, launched = depart(is_waited_for), torch.cuda.Event()
        launched.record()
        launched.synchronize()
        if flight.rereads is not None:
            were_over.append(flight.over.query())
        return flight

    monkeypatch.setattr(engine.canary.session.checks.rereads, "_ops", replace(KERNELS, check_content=slow))
    monkeypatch.setattr(engine.canary, "end_step", timed)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert were_over.count(False) >= 2


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Whatever waits for the device without saying so raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_a_decode_step_waits_for_one_copy(make, outcome, settings):
    """Without a canary a greedy step waits for the event behind the copy of its results, and for nothing else."""
    settings = settings | {"dtype": "float32", "device": "cuda"}
    engine = make("off", graphs="on", **settings)
    decode, steps = engine.runner.decode, []

    def strict(requests):
        steps.append(len(requests))
        with refusing_to_wait():
            return decode(requests)

    engine.runner.decode = strict
    captured, _ = outcome(engine, max_new_tokens=32)
    assert captured == outcome(make("off", **settings), max_new_tokens=32)[0]
    assert len(steps) > 4


@pytest.mark.parametrize("mode", ["off", "raise"])
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_a_step_of_a_lagging_host_waits_for_nothing_but_copies(make, settings, mode):
    """The engine's whole step, with a canary too: what it waits for are events behind declared copies."""
    settings = settings | {"dtype": "float32", "device": "cuda", "schedule": "overlap", "prefix_cache": False}
    engine = make(mode, graphs="on", max_total_tokens=2048, context_length=256, **settings)
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_new_tokens=100, ignore_eos=True))
    events = []
    for _ in range(10):
        events += engine.step()
    with refusing_to_wait():
        for _ in range(12):
            events += engine.step()
    while engine.has_work:
        events += engine.step()
    plain = make("off", graphs="on", **settings | {"schedule": "sync"})  # 8-bit rows follow the shape of a product
    outputs = plain.generate(PROMPTS, SamplingParams(max_new_tokens=100, ignore_eos=True))
    for number, output in enumerate(outputs):
        assert output.token_ids == tuple(t for e in events if e.request_id == f"req-{number}" for t in e.token_ids)
    assert engine.canary is None or engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_what_a_canary_launches_later_is_compiled_when_it_is_armed(make, outcome, settings, monkeypatch):
    """Requests that end, and others that take their pages: none of their steps waits for a compiler."""
    from triton.runtime.jit import JITFunction

    own = {
        kernel
        for module in (check, finite, fingerprint, poison)
        for kernel in vars(module).values()
        if isinstance(kernel, JITFunction)
    }
    for kernel in own:
        kernel.device_caches.clear()  # of what other tests have compiled
    compiled, compile_one = list[str](), JITFunction._do_compile

    def noted(kernel: JITFunction, *args: object, **kwargs: object) -> object:
        compiled.extend([kernel.fn.__name__] if kernel in own else [])
        return compile_one(kernel, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    engine = make(graphs="on", device="cuda", schedule="overlap", prefix_cache=False, **settings)
    assert {"_check_content_kernel", "_finite_check_kernel", "_fingerprint_kernel"} <= {*compiled}
    assert {"_poison_fill_kernel", "_poison_check_kernel"} <= {*compiled}
    compiled.clear()
    for _ in range(6):
        outcome(engine, max_new_tokens=40)
    assert compiled == []
    assert engine.canary.session.poisoner.poisoned


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("mode", ["off", "raise"])
def test_memory_does_not_grow(make, outcome, mode, schedule):
    """1,000 steps hold no more than the first 300 did."""
    engine = make(mode, graphs="on", device="cuda", dtype="float32", topk=2, num_steps=2, schedule=schedule)
    expect_memory_to_stay(engine, lambda: outcome(engine, max_new_tokens=64), 300, 1000)
