"""A step's tokens on their way to the host: the buffers, who waits for what, and what is told where nobody did."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError, Report
from kvcanary.invariants import AcceptanceError, CommitError, StagingError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine import engine as engine_module
from spec_engine.mock import MockDraft, MockModel, MockTokenizer, TokenOracle
from spec_engine.models.embedded import load_excerpts
from spec_engine.step.streams import StagingRing

ORACLE = TokenOracle(3, 997)
PROMPTS = [[11, 4, 8, 15, 16, 23, 42], [3, 1, 4]]
PARAMS = SamplingParams(max_new_tokens=24)
TRUTHS = [tuple(ORACLE.continuation(prompt, 24)) for prompt in PROMPTS]
SETTINGS = {"dtype": "float64", "max_total_tokens": 4096, "context_length": 256, "page_size": 4, "num_steps": 3}


def make(mode: str = "raise", accept_len: int = 3, **settings) -> Engine:
    target = MockModel(ORACLE)
    config = EngineConfig(**(SETTINGS | {"schedule": "overlap", "canary": CanaryConfig(mode=mode)} | settings))
    draft = None if config.draft == "none" else MockDraft(target, accept_len)
    return Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())


def run(engine: Engine, events: list) -> None:
    """To the end, or to what stops the engine; ``events`` are those that left."""
    while engine.has_work:
        events += engine.step()


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def shorten_ring(engine: Engine) -> None:
    """A ring of one buffer, where the host is one step behind."""
    shape = engine.results._ring.take().tensor.shape
    engine.results._ring = StagingRing(engine.streams, "results", 1, shape, torch.int64)


@pytest.mark.parametrize("mode", ["off", "raise"])
@pytest.mark.parametrize("settings", [{}, {"draft": "none"}, {"topk": 1, "adaptive_steps": True}], ids=str)
def test_tokens_come_out_of_the_ring(mode, settings, monkeypatch):
    """What leaves is what the copy brought: written over in the buffer, other tokens leave, where nobody compares."""
    engine = make(mode, **settings)
    assert tokens_of(engine) == TRUTHS
    assert mode == "off" or engine.canary.certificate()["findings"] == []
    monkeypatch.setattr(engine_module, "check_root", lambda *reported: None)
    outputs = tokens_of(with_a_changed_ring(**settings))
    assert outputs == [tuple(min(token, 500) for token in truth) for truth in TRUTHS]


@pytest.mark.parametrize("settings", [{}, {"topk": 1, "adaptive_steps": True}], ids=str)
def test_tokens_that_changed_on_their_way_are_refused(settings):
    """The next tree hangs on the token that the device has, not on the one that the host has heard."""
    with pytest.raises(
        AcceptanceError, match=r"tree was drafted behind token \d+, but the last token that left is 500"
    ):
        tokens_of(with_a_changed_ring(**settings))


def with_a_changed_ring(**settings) -> Engine:
    """No canary; tokens above 500 are 500 in the buffers of the ring."""
    engine = make("off", **settings)
    receive = engine.streams.host.receive

    def receive_and_change(*reported):
        receive(*reported)
        for buffer in engine.results._ring._buffers:
            buffer.tensor.clamp_(max=500)

    engine.streams.host.receive = receive_and_change
    return engine


def test_a_host_that_waits_for_every_step_copies_nothing():
    """Schedule sync has no ring, and no side stream."""
    engine = make(schedule="sync")
    assert tokens_of(engine) == TRUTHS
    assert (engine.results._ring, engine.streams._sides) == (None, {})


@pytest.mark.parametrize(("mode", "error"), [("raise", KVCorruptionError), ("log", CommitError), ("abort", None)])
def test_a_result_that_nobody_waits_for_is_told(mode, error):
    """O1 names buffer and copy before a token of it leaves; mode abort ends the requests of that step.

    Mode log goes on, to the always-on check that refuses the stale count.
    """
    engine = make(mode)
    host = engine.streams.host
    host.receive = lambda event, what, requests: host.use(what, event.op.writes, requests=requests)
    names = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    events = []
    with nullcontext() if error is None else pytest.raises(error):
        run(engine, events)
    if mode == "abort":
        assert {event.request_id for event in events if event.finish_reason == "kv_corruption"} == set(names)
    assert [event.token_ids for event in events if event.token_ids] == []
    finding = engine.canary.findings[0]
    assert finding.code == "O1"
    assert finding.found["access"].startswith(
        "'results' on stream host touches host buffer 'results 0' without waiting for 'results' (stream results,"
    )


@pytest.mark.parametrize("mode", ["off", "raise"])
@pytest.mark.parametrize("settings", [{"draft": "none"}, {"topk": 1, "adaptive_steps": True}], ids=str)
def test_copies_for_which_nobody_waits_fill_their_memory_without_gaps(mode, settings, monkeypatch):
    """From a GPU into a part of each row of a buffer a copy goes by way of memory that is not pinned: a wait."""
    has_gaps, copy = [], torch.Tensor.copy_

    def seen(target, source, non_blocking=False):
        if non_blocking:
            has_gaps.append(not target.is_contiguous())
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", seen)
    assert tokens_of(make(mode, **settings)) == TRUTHS
    assert has_gaps
    assert not any(has_gaps)


def test_a_ring_that_is_too_short_is_told():
    """The next step has taken the buffer: O1 says for which use it is read, and in which it is."""
    engine = make()
    shorten_ring(engine)
    with pytest.raises(KVCorruptionError) as caught:
        tokens_of(engine)
    [finding] = caught.value.findings
    assert finding.code == "O1"
    assert finding.found["access"] == (
        "'results' on stream host is meant for generation 1 of host buffer 'results 0', which is in 2 now"
    )


def test_a_ring_that_is_too_short_is_refused_without_a_canary():
    """StagingError with buffer, uses and length of the ring."""
    engine = make("off")
    shorten_ring(engine)
    words = "host buffer 'results 0' is read for its use 1, it is in its use 2: a ring of 1 buffers"
    with pytest.raises(StagingError, match=words):
        tokens_of(engine)


# what stops the engine


def damage(engine: Engine) -> None:
    """A record of the first request's first page."""
    engine.canary.session.state.by_name["target"].records[engine.running[0].pages[0] * 4, 1] ^= 1 << 40


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_tokens_of_a_clean_step_leave_before_the_error(schedule):
    """Whatever the schedule, all tokens sampled before the damage leave, and none that was sampled after it."""
    engine = make(schedule=schedule)
    name = engine.submit(PROMPTS[0], PARAMS)
    for _ in range(4):
        events = engine.step()
    sampled = int(engine.relay.lens[engine.running[0].row]) + 1 - len(PROMPTS[0])
    damage(engine)
    left = list(engine.running[0].output_ids)
    assert events
    events = []
    with pytest.raises(KVCorruptionError):
        run(engine, events)
    assert {event.request_id for event in events} <= {name}
    left += [token for event in events for token in event.token_ids]
    assert left == list(TRUTHS[0][:sampled])
    assert (len(events) > 0) == (schedule == "overlap")


def test_a_request_that_ends_in_the_clean_step_does_not_swallow_the_error():
    """Its last tokens leave, then the error comes although nothing is left to run."""
    engine = make()
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=1 + 3 * 4))
    collect, collected = engine.canary.collect, []

    def sixth_raises(flight):
        collected.append(collect(flight))
        if len(collected) == 6:  # after the prefill and four verifies
            raise KVCorruptionError([], Report((), "stopped", {}))
        return collected[-1]

    engine.canary.collect = sixth_raises
    events = []
    with pytest.raises(KVCorruptionError):
        run(engine, events)
    assert sum((event.token_ids for event in events), ()) == TRUTHS[0][:13]
    assert events[-1].finish_reason == "length"
    assert not engine.has_work


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["off", "raise"])
def test_tokens_come_out_of_pinned_memory(mode):
    """On a GPU the copy runs beside the forwards, and the host reads what it would have waited for."""
    prompts = [excerpt.prompt for excerpt in load_excerpts()[:3]]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    outputs = []
    for schedule in ("sync", "overlap"):
        canary = CanaryConfig(mode=mode)
        engine = Engine(EngineConfig(device="cuda", schedule=schedule, max_total_tokens=2048, canary=canary))
        outputs.append([output.token_ids for output in engine.generate(prompts, params)])
    assert outputs[0] == outputs[1]
    assert all(buffer.tensor.is_pinned() for buffer in engine.results._ring._buffers)
