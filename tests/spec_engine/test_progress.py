"""An engine that goes round for ever is told, whatever makes it do so; long work that ends is not taken for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from kvcanary import CanaryConfig, faults
from kvcanary.invariants import StalledError, rows
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.host_rows import HostRows
from spec_engine.memory.kv_memory import KVMemory

MOST_STILL_STEPS = 64  # a fourth of what it is, for a fourth of the time
PROMPTS = [[number % 97 for number in range(start, start + 24)] for start in range(4)]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
PRESSED = {"page_size": 4, "topk": 2, "num_steps": 2, "max_total_tokens": 176, "new_token_ratio": 0.0}


@pytest.fixture(autouse=True)
def _fewer_still_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows.MOST_STILL_STEPS > MOST_STILL_STEPS
    monkeypatch.setattr(rows, "MOST_STILL_STEPS", MOST_STILL_STEPS)


def make_engine(folder, canary: str = "off", **settings) -> Engine:
    config = CanaryConfig(mode=canary, quarantine=4)
    return Engine(EngineConfig(model=str(folder), dtype="float64", canary=config, **(PRESSED | settings)))


def end_of(engine: Engine) -> str:
    """The message with which these prompts come to a standstill."""
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    with pytest.raises(StalledError) as caught:
        deque((engine.step() for _ in range(3 * MOST_STILL_STEPS)), maxlen=0)
    return str(caught.value)


def test_requests_that_retract_each_other_for_ever_are_told(toy_model) -> None:
    """#22406 undone under a canary: forwards run, no token leaves; the message says who retracts whom, and for what."""
    engine = make_engine(toy_model, "raise", page_size=16, max_total_tokens=30 * 16, num_steps=3)
    with faults.arm("lengths.worst_case_estimate"):
        message = end_of(engine)
    prefilled = engine.metrics.prefill_tokens
    assert prefilled > sum(map(len, PROMPTS))
    assert "gave up their pages: req-" in message
    assert ", last for req-" in message
    assert "pages asked for the next forward" in message
    assert " in quarantine; its requests need " in message
    assert "what they need is there, so that no setting helps" in message


def test_it_ends_without_a_quarantine(toy_model) -> None:
    """The same fault with the canary off costs retractions, and every token comes."""
    settings = {"page_size": 16, "max_total_tokens": 30 * 16, "num_steps": 3}
    expected = make_engine(toy_model, max_total_tokens=4096).generate(PROMPTS, GREEDY)
    engine = make_engine(toy_model, **settings)
    with faults.arm("lengths.worst_case_estimate"):
        outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert engine.metrics.num_retractions > 4


def never_admit(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    patch.setattr(engine.scheduler, "admit", list)


def keep_in_quarantine(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    patch.setattr(PageAllocator, "num_ready", property(lambda pages: 0))


def retract_whoever_is_prefilled(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Each of two is sent back as soon as it could decode."""
    inner = engine._launch

    def launch(turn, chunks, events):
        if len(engine.running) > 1 and not chunks:
            events += engine._retract()
        else:
            inner(turn, chunks, events)

    patch.setattr(engine, "_launch", launch)
    patch.setattr(engine.scheduler, "max_running", 2)


def fail_every_load(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """A block that does not come back is asked for again, and again."""

    def load(rows, places, slots):
        raise OSError("host memory is gone")

    patch.setattr(HostRows, "load", load)
    patch.setattr(KVMemory, "drop_block", lambda memory, request: None)


@pytest.mark.parametrize(
    ("break_it", "settings", "words"),
    [
        (never_admit, {}, "running: nobody; waiting for pages: req-0 "),
        (keep_in_quarantine, {}, "running: req-0, req-1, req-2, req-3; waiting for pages: nobody; "),
        (fail_every_load, {"host_pages": 64}, "sent back by a load from the host that failed: req-"),
        (retract_whoever_is_prefilled, {}, "gave up their pages: req-"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_whatever_keeps_an_engine_from_going_on_is_told(
    toy_model, monkeypatch, break_it: Callable, settings: dict, words: str
) -> None:
    """Admission, quarantine, the host or retraction: a bounded number of steps, and the message says which."""
    engine = make_engine(toy_model, **settings)
    break_it(monkeypatch, engine)
    assert words in end_of(engine)
    assert engine.metrics.num_steps < MOST_STILL_STEPS + 100


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_long_prompts_are_progress_also_when_they_are_computed_again(toy_model, schedule) -> None:
    """More chunks than steps without a token may be, twice, and with a retraction between them."""
    settings = {"max_total_tokens": 4096, "prefill_chunk_tokens": 1, "prefix_cache": False, "draft": "none"}
    engine = make_engine(toy_model, schedule=schedule, **settings)
    lengths = MOST_STILL_STEPS + 8, 4
    prompts = [[number % 97 for number in range(length)] for length in lengths]
    expected = make_engine(toy_model, max_total_tokens=4096).generate(prompts, GREEDY)
    ids = [engine.submit(prompt, GREEDY, priority=place) for place, prompt in enumerate(prompts)]
    outputs: dict[str, list[int]] = {name: [] for name in ids}
    while engine.has_work:
        if len(outputs[ids[0]]) == 4 and not engine.metrics.num_retractions:
            engine._deliver(0, events := [])
            engine._retract()
            for event in events:
                outputs[event.request_id] += event.token_ids
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
    assert engine.metrics.prefill_tokens >= 2 * lengths[0]
    assert [tuple(outputs[name]) for name in ids] == [output.token_ids for output in expected]


def test_an_idle_engine_may_be_asked_for_ever(toy_model) -> None:
    """Steps with nothing to do are not steps without progress."""
    engine = make_engine(toy_model)
    for _ in range(MOST_STILL_STEPS + 2):
        assert engine.step() == []
