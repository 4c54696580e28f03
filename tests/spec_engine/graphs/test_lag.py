"""A host behind captured steps: it launches the next one first, hears then, and no token leaves that was not judged."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from kvcanary import KVCorruptionError
from kvcanary.captured.in_flight import InFlight
from kvcanary.manager.step import StepChecks
from kvcanary_kernels.record.layout import CHAIN
from spec_engine import Engine, SamplingParams
from spec_engine.acceptance.walk import NO_TOKEN
from spec_engine.models.embedded import load_excerpts

PROMPTS = [excerpt.prompt[:40] for excerpt in load_excerpts()[20:22]]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
SHAPES = [{"draft": "none"}, {"topk": 2, "num_steps": 2}]


@pytest.fixture
def start(make):
    """Settings -> an engine of schedule overlap with graphs, some steps after its prompts were submitted."""

    def started(steps: int = 4, mode: str = "raise", **settings: object) -> Engine:
        settings = {"page_size": 4} | settings
        engine = make(mode, graphs="on", schedule="overlap", prefix_cache=False, **settings)
        for prompt in PROMPTS:
            engine.submit(prompt, GREEDY)
        for _ in range(steps):
            engine.step()
        return engine

    return started


@pytest.fixture
def truths(make) -> list[tuple[int, ...]]:
    """What both requests say without graphs and without a canary."""
    engine = make("off", draft="none")
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def damage(engine: Engine, number: int) -> None:
    """A record in the first page of a request."""
    engine.canary.session.state.by_name["target"].records[engine.running[number].pages[0] * 4 + 1, CHAIN] ^= 1 << 40


def collect(engine: Engine, events: list) -> None:
    """To the end, or to what stops the engine; ``events`` are those that left."""
    while engine.has_work:
        events += engine.step()


def run(engine: Engine) -> dict[str, list[int]]:
    """To the end; tokens by request that left."""
    left: dict[str, list[int]] = {request.request_id: list(request.output_ids) for request in engine.running}
    while engine.has_work:
        for event in engine.step():
            left[event.request_id] += event.token_ids
    return left


def test_the_next_step_is_launched_before_the_last_is_collected(start):
    """Its tokens are not asked for, nor what the canary says of it."""
    for settings in SHAPES:
        engine = start(**settings)
        result = engine._pending[-1].result
        assert not result.flight.is_collected
        assert [part.tokens for part in result.parts] == [[NO_TOKEN], [NO_TOKEN]]
        assert list(run(engine)) == ["req-0", "req-1"]


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_tokens_of_clean_steps_leave_before_the_error(start, truths, settings):
    """All that were sampled before the damage leave, and none after it, though a later step was launched by then."""
    engine = start(**settings)
    sampled = [int(engine.relay.lens[request.row]) + 1 - request.prompt_len for request in engine.running]
    left = [list(request.output_ids) for request in engine.running]
    damage(engine, 1)
    events: list = []
    with pytest.raises(KVCorruptionError):
        collect(engine, events)
    for number, own in enumerate(left):
        own += [token for event in events if event.request_id == f"req-{number}" for token in event.token_ids]
        assert tuple(own) == truths[number][: sampled[number]]
    assert not engine._pending


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_in_mode_abort_the_others_go_on(start, truths, settings):
    """The damaged request ends without a token of the step that read the damage, nor of the one behind it."""
    engine = start(mode="abort", **settings)
    request = engine.running[1]
    sampled = int(engine.relay.lens[request.row]) + 1 - request.prompt_len
    damage(engine, 1)
    left = run(engine)
    assert tuple(left["req-0"]) == truths[0]
    assert tuple(left["req-1"]) == truths[1][:sampled]
    assert request.finish_reason == "kv_corruption"


def test_a_step_that_needs_the_tokens_waits_for_them(start, truths, make):
    """A request that samples joins, so the program no longer decides: the host catches up, and nothing changes."""
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.8, seed=3)
    engine = start(draft="none", max_running_requests=3)
    name = engine.submit(PROMPTS[0], sampling)
    left = {request.request_id: list(request.output_ids) for request in engine.running} | {name: []}
    while engine.has_work:
        for event in engine.step():
            left[event.request_id] += event.token_ids
    alone = make("off", draft="none").generate([PROMPTS[0]], sampling)[0].token_ids
    assert [tuple(own) for own in left.values()] == [*truths, alone]
    assert engine.canary.certificate()["findings"] == []


def test_a_batch_that_no_bucket_holds_waits_for_the_tokens(start, truths):
    """Eager steps read what captured ones have left."""
    engine = start(2, draft="none", graph_buckets=[1])
    engine.cancel("req-0")
    engine.step()
    engine.submit(PROMPTS[0], GREEDY)
    tokens = {request.request_id: list(request.output_ids) for request in [*engine.running, *engine.scheduler.waiting]}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert (tuple(tokens["req-1"]), tuple(tokens["req-2"])) == (truths[1], truths[0])
    assert engine.canary.certificate()["findings"] == []
    assert "truth not known to the host" not in engine.canary.certificate()["unchecked"]


def test_in_mode_abort_a_write_that_was_refused_ends_its_request(start, truths):
    """Its page is never written, so it is not made final either: the finding is what is told."""
    engine = start(mode="abort", draft="none", page_size=1)
    request, other = engine.running
    row, decode = engine.request_table.table[request.row], engine.runner.decode

    def over_a_strangers_entry(requests):
        row[int(engine.relay.lens[request.row])] = int(engine.request_table.table[other.row, 0])
        engine.runner.decode = decode
        return decode(requests)

    engine.runner.decode = over_a_strangers_entry
    left = run(engine)
    assert request.finish_reason == "kv_corruption"
    assert engine.canary.findings[0].code == "W2"
    assert tuple(left["req-1"]) == truths[1]


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_an_interrupt_while_the_host_waits_loses_nothing(start, truths, settings, monkeypatch):
    """Control-C between a step and its tokens: whoever goes on hears of it then, and the canary too."""
    engine, land = start(**settings), StepChecks.collect

    def interrupted(checks: StepChecks, flight: InFlight | None = None) -> None:
        monkeypatch.setattr(StepChecks, "collect", land)
        raise KeyboardInterrupt

    left = {request.request_id: list(request.output_ids) for request in engine.running}
    monkeypatch.setattr(StepChecks, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_work:
        for event in engine.step():
            left[event.request_id] += event.token_ids
    assert [tuple(own) for own in left.values()] == truths
    assert engine.canary.certificate()["findings"] == []


def test_a_body_that_raises_does_not_stop_the_steps_behind_it(make) -> None:
    """Its forward is H1, for it has not run; the next one opens as always, and tokens are as if nothing had been."""
    engine, plain = (make("log", draft="none", page_size=4, graphs="on", graph_buckets=[1]) for _ in range(2))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    engine.submit(PROMPTS[0], params)
    events = [*engine.step(), *engine.step()]
    program = engine.runner._buckets[0].step
    model, program._model = program._model, Mock(side_effect=RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    program._model = model
    while engine.has_work:
        events += engine.step()
    [output] = plain.generate(PROMPTS[:1], params)
    assert [token for event in events for token in event.token_ids] == list(output.token_ids)
    assert {finding.code for finding in engine.canary.findings} == {"H1"}
