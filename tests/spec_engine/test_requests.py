"""Lives of requests: what is cached for the next one, who goes first, who is sent back, and who is cancelled."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.cache.prefix_tree import PrefixTree

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
LONG = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def make_engine(folder, **settings) -> Engine:
    """Small pages, float64, the canary on."""
    canary = CanaryConfig(mode="raise", content="full")
    settings = {"page_size": 4, "topk": 2, "num_steps": 3, "max_total_tokens": 2048, "canary": canary} | settings
    return Engine(EngineConfig(model=str(folder), dtype="float64", **settings))


def outputs_of(engine: Engine, prompts, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(prompts, params)]


def finish(engine: Engine) -> dict[str, list]:
    """All events to the end, by request."""
    events: dict[str, list] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def tokens(events: list) -> tuple[int, ...]:
    return sum((event.token_ids for event in events), ())


@pytest.mark.parametrize("draft", ["none", "eagle3"])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_a_second_turn_forwards_only_what_is_new(toy_model, draft, schedule):
    """The pages of a finished request serve the prompt that continues it, with the same output as without a cache."""
    engine = make_engine(toy_model, draft=draft, schedule=schedule)
    (first,) = outputs_of(engine, [LONG])
    turn = [*LONG, *first, 5, 6, 7]
    before = engine.metrics.prefill_tokens
    (second,) = outputs_of(engine, [turn])
    assert engine.metrics.prefill_tokens - before <= len(turn) - 4 * ((len(LONG) + len(first)) // 4 - 1)
    assert second == outputs_of(make_engine(toy_model, draft=draft, prefix_cache=False), [turn])[0]
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_requests_that_run_together_share_what_they_have_in_common(toy_model, schedule):
    """A prompt that arrives while another runs begins with the pages that the other has computed."""
    engine = make_engine(toy_model, schedule=schedule)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    engine.submit(LONG, params)
    for _ in range(4):
        engine.step()
    engine.submit([*LONG[:50], 1, 2, 3], params)
    early = [event for event in engine.step() if event.request_id == "req-1"]
    first, second = engine.running
    assert second.pages[:12] == first.pages[:12]
    events = finish(engine)
    alone = make_engine(toy_model, prefix_cache=False)
    assert tokens([*early, *events["req-1"]]) == outputs_of(alone, [[*LONG[:50], 1, 2, 3]], params)[0]


def test_pages_that_two_requests_computed_alike_are_kept_once(toy_model):
    """Where the cache has pages already, the row that is published goes on over the cache's."""
    engine = make_engine(toy_model)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    for prompt in (LONG[:40], LONG):
        engine.submit(prompt, params)
    for _ in range(3):
        engine.step()
    first, second = engine.running
    assert not set(first.pages) & set(second.pages)
    third = engine.submit(LONG, params)
    events = engine.step()
    assert first.pages[:9] == second.pages[:9] == engine.running[2].pages[:9]
    assert second.pages[9:14] == engine.running[2].pages[9:14]
    events += [event for own in finish(engine).values() for event in own]
    outputs = [tokens([event for event in events if event.request_id == name]) for name in ("req-1", third)]
    assert outputs[0] == outputs[1][-len(outputs[0]) :]


def test_salts_share_nothing(toy_model):
    """Equal prompts of two salts are computed twice."""
    engine = make_engine(toy_model)
    for salt in ("one", "two"):
        engine.submit(LONG, GREEDY, salt=salt)
        finish(engine)
    assert engine.metrics.prefill_tokens == 2 * len(LONG)
    engine.submit(LONG, GREEDY, salt="one")
    finish(engine)
    assert engine.metrics.prefill_tokens < 2 * len(LONG) + 8


@pytest.mark.parametrize("running", [False, True])
def test_adapters_share_nothing(toy_model, running):
    """Neither pages of a request that has ended nor of one that runs; the same adapter's are shared."""
    engine = make_engine(toy_model)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    pages = []
    for adapter in ("one", "two", "one"):
        engine.submit(LONG, params, adapter=adapter)
        for _ in range(4):
            engine.step()
        pages.append(set(engine.running[-1].pages))
        if not running:
            finish(engine)
    assert not pages[0] & pages[1]
    assert pages[0] & pages[2]
    finish(engine)
    assert engine.canary.certificate()["findings"] == []


def test_a_cache_that_ignores_the_adapter_is_found(toy_model, monkeypatch):
    """A whole, consistent row, but another adapter's: its chain breaks where it begins, in both pools."""
    keys = PrefixTree._page_keys
    monkeypatch.setattr(PrefixTree, "_page_keys", lambda tree, tokens, salt, adapter: keys(tree, tokens, salt, ""))
    engine = make_engine(toy_model)
    engine.submit(LONG, GREEDY, adapter="one")
    finish(engine)
    engine.submit(LONG, GREEDY, adapter="two")
    with pytest.raises(KVCorruptionError) as caught:
        finish(engine)
    assert {(finding.code, finding.position) for finding in caught.value.findings} == {("R5", 0)}


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("steps", range(7))
def test_a_request_can_be_cancelled_at_any_moment(toy_model, schedule, steps):
    """Waiting, between chunks or between drafts: its pages come back, the others' outputs are what they were."""
    engine = make_engine(toy_model, schedule=schedule, prefill_chunk_tokens=25, max_running_requests=2)
    prompts = [LONG, LONG[::-1], LONG[10:40]]
    names = [engine.submit(prompt, GREEDY) for prompt in prompts]
    events: dict[str, list] = {}
    for _ in range(steps):
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    cancelled = [engine.cancel(names[1]), engine.cancel(names[2])]
    assert [event.finish_reason for event in cancelled] == ["cancelled"] * 2
    assert engine.cancel(names[1]) is None
    for name, more in finish(engine).items():
        events.setdefault(name, []).extend(more)
    assert tokens(events[names[0]]) == outputs_of(make_engine(toy_model, draft="none"), [LONG])[0]
    assert not any(event.finished for name in names[1:] for event in events.get(name, []))
    assert engine.memory.num_available == engine.allocator.num_pages


def test_priorities_go_first(toy_model):
    """With one row the urgent request that came last is served next, equals in the order of their coming."""
    engine = make_engine(toy_model, max_running_requests=1)
    names = [engine.submit(LONG[:9], GREEDY, priority=priority) for priority in (0, 0, 1, 1)]
    ended = [
        event.request_id for own in [finish(engine)] for events in own.values() for event in events if event.finished
    ]
    assert ended == [names[2], names[3], names[0], names[1]]


def test_the_urgent_are_retracted_last(toy_model):
    """Under pressure the request of lower priority gives up its pages, though it has more output."""
    engine = make_engine(toy_model, max_total_tokens=240, new_token_ratio=0.0, prefix_cache=False)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    low = engine.submit(LONG, params, priority=0)
    for _ in range(5):
        engine.step()
    engine.submit(LONG[::-1], params, priority=1)
    engine.submit(LONG[5:], params, priority=1)
    for _ in range(20):
        if not engine.metrics.num_retractions:
            engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == [low]
    events = finish(engine)
    assert (
        tokens(events[low])
        == outputs_of(make_engine(toy_model, draft="none"), [LONG], params)[0][-len(tokens(events[low])) :]
    )


def test_estimate_and_pages_taken_agree_under_pressure(toy_model):
    """Retractions raise the share of new tokens that admission counts with; all pages come back in the end."""
    engine = make_engine(toy_model, max_total_tokens=256, new_token_ratio=0.0, schedule="overlap")
    prompts = [LONG[start : start + 40] for start in range(0, 20, 4)]
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    assert outputs_of(engine, prompts, params) == outputs_of(make_engine(toy_model, draft="none"), prompts, params)
    assert engine.metrics.num_retractions > 0
    engine.memory.cache.check_references([])
