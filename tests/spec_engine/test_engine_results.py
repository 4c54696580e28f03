"""What leaves the engine: stop strings, text that is held back, log-probabilities, and prompts that are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvcanary import CanaryConfig
from spec_engine import ConfigError, Engine, EngineConfig, Output, SamplingParams
from spec_engine.mock import MockDraft, MockModel, MockTokenizer, TokenOracle, random_model, with_random_weights
from spec_engine.models.eagle import Eagle

ORACLE = TokenOracle(3, 997)
PROMPT = [11, 4, 8, 15, 16, 23, 42]
TRUTH = ORACLE.continuation(PROMPT, 24)
SETTINGS = {"dtype": "float64", "max_total_tokens": 4096, "context_length": 256, "page_size": 4, "num_steps": 3}


@pytest.fixture(params=["sync", "overlap"])
def make(request: pytest.FixtureRequest):
    """Engines on a MockModel whose every verify accepts four tokens; token 5 is the text `5 `."""
    target, settings = MockModel(ORACLE), SETTINGS | {"schedule": request.param, "canary": CanaryConfig(mode="raise")}

    def build(**others) -> Engine:
        config = EngineConfig(**(settings | others))
        draft = None if config.draft == "none" else MockDraft(target, 4)
        return Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())

    return build


def text(token_ids: list[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


def parts_of(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> list:
    return list(engine.stream([prompt], params))


def is_idle(engine: Engine) -> bool:
    """Every page is back, and nothing is kept of a request that ended."""
    return engine.memory.num_available == engine.allocator.num_pages and not engine._scans


def test_a_stop_string_ends_a_request_inside_an_accepted_chain(make):
    """Tokens up to the one that completes it are kept, its text and what was accepted behind it is not."""
    engine, stop = make(), text(TRUTH[5:7])[:-1]  # tokens 1 to 4 and 5 to 8 are accepted together
    [output] = engine.generate([PROMPT], SamplingParams(max_new_tokens=24, stop=("never", stop)))
    assert (output.token_ids, output.finish_reason) == (tuple(TRUTH[:7]), "stop")
    assert output.text == text(TRUTH[:5])
    assert is_idle(engine)


def test_text_that_may_begin_a_stop_string_waits(make):
    """It leaves as soon as it is none; in every event no text is ahead of what can be shown."""
    stop = text([*TRUTH[3:5], 0])
    events = parts_of(make(), SamplingParams(max_new_tokens=9, stop=(stop,)))
    assert [event.token_ids for event in events] == [tuple(TRUTH[:1]), tuple(TRUTH[1:5]), tuple(TRUTH[5:9])]
    assert [event.text for event in events] == [text(TRUTH[:1]), text(TRUTH[1:3]), text(TRUTH[3:9])]


def test_text_that_waits_goes_out_at_the_end(make):
    """At the longest output, and when the request is cancelled, nothing is lost and nothing comes twice."""
    params = SamplingParams(max_new_tokens=5, stop=(text([*TRUTH[3:5], 0]),))
    assert "".join(event.text for event in parts_of(make(), params)) == text(TRUTH[:5])
    engine = make()
    name = engine.submit(PROMPT, SamplingParams(max_new_tokens=24, stop=params.stop))
    events = []
    while sum(len(event.token_ids) for event in events) < 5:
        events += engine.step()
    last = engine.cancel(name)
    assert (last.text, last.finish_reason) == (text(TRUTH[3:5]), "cancelled")
    assert "".join(event.text for event in [*events, last]) == text(TRUTH[:5])
    while engine.has_work:
        assert engine.step() == []
    assert is_idle(engine)


def test_a_stop_string_of_a_retracted_request_is_found(make):
    """Text, stops and log-probabilities of a request that resumes are those of one that was never retracted."""
    stop = text(TRUTH[14:16])[:-1]
    params = SamplingParams(max_new_tokens=24, stop=(stop,), logprobs=1)
    others = [[12, 4], [13, *range(50, 70)]]
    pressed = make(topk=1, max_total_tokens=72, new_token_ratio=0.0, prefix_cache=False)
    outputs = pressed.generate([PROMPT, *others], params)
    assert pressed.metrics.num_retractions > 0
    wanted = make(draft="none").generate([PROMPT, *others], params)
    assert [values(output) for output in outputs] == [values(output) for output in wanted]
    assert outputs[0].text == text(TRUTH[:14])
    assert is_idle(pressed)


def values(output: Output) -> tuple:
    return output.text, output.token_ids, output.finish_reason, output.logprobs


def test_what_ends_on_damaged_bytes_is_withdrawn(make, monkeypatch):
    """The last tokens do not leave; text of earlier ones that was held back does, once."""
    engine = make()
    release = engine.memory.release
    monkeypatch.setattr(engine.memory, "release", lambda request, publish: release(request, publish) and False)
    events = parts_of(engine, SamplingParams(max_new_tokens=9, stop=(text([*TRUTH[3:5], 0]),)))
    assert sum((event.token_ids for event in events), ()) == tuple(TRUTH[:5])
    assert events[-1].finish_reason == "kv_corruption"
    assert "".join(event.text for event in events) == text(TRUTH[:5])
    assert events[-1].text == text(TRUTH[3:5])


def test_who_is_aborted_ends_also_where_the_step_was_not_its_own(make):
    """Mode abort: damage that a prefill of others finds ends its request there, and nobody waits for it for ever."""
    engine = make(canary=CanaryConfig(mode="abort", budget=1 << 40))
    params = SamplingParams(max_new_tokens=24)
    first = engine.submit(PROMPT, params)
    while not any(request.output_ids for request in engine.running):
        engine.step()
    engine.pools["target"].kv[0, engine.request_table.table[engine.running[0].row, 2]] += 1
    second = engine.submit([12, *range(50, 70)], params)
    reasons = {}
    for _ in range(60):
        if not engine.has_work:
            break
        reasons |= {event.request_id: event.finish_reason for event in engine.step()}
    assert reasons == {first: "kv_corruption", second: "length"}
    assert is_idle(engine)


# prompts that are refused


def test_a_refused_prompt_does_not_stop_the_others(make):
    """Empty, too long, with an unknown token: each has its sentence in its place, and good ones complete."""
    engine = make()
    prompts = [PROMPT, [], [1] * 300, [5, 997], PROMPT]
    good, empty, long, stray, again = engine.generate(prompts, SamplingParams(max_new_tokens=8))
    assert good.token_ids == again.token_ids == tuple(TRUTH[:8])
    assert good.error is None
    assert {output.finish_reason for output in (empty, long, stray)} == {"refused"}
    assert empty.error == "a prompt needs at least one token, got an empty one"
    assert long.error == "prompt of 300 tokens + max_new_tokens 8 = 308 exceeds the context length 256"
    assert stray.error == "prompt token 997 is out of the vocabulary of 997 tokens"
    assert (empty.token_ids, empty.text, empty.request_id) == ((), "", "req-1")


def test_a_refused_prompt_ends_its_own_stream_only(make):
    """Its one event has the sentence and comes first; ids follow the order of the prompts, the good ones complete."""
    events = list(make().stream([[5, 997], PROMPT, []], SamplingParams(max_new_tokens=8)))
    assert [(event.request_id, event.finish_reason, event.error) for event in events[:2]] == [
        ("req-0", "refused", "prompt token 997 is out of the vocabulary of 997 tokens"),
        ("req-2", "refused", "a prompt needs at least one token, got an empty one"),
    ]
    assert {event.request_id for event in events[2:]} == {"req-1"}
    assert sum((event.token_ids for event in events[2:]), ()) == tuple(TRUTH[:8])
    assert [(event.text, event.token_ids) for event in events[:2]] == [("", ())] * 2


def test_parameters_that_no_prompt_can_use_are_refused_as_a_whole(make):
    """A token id beyond the vocabulary is no fault of a prompt: nothing is queued."""
    engine, params = make(), SamplingParams(logit_bias={997: 1.0})
    for attempt in (
        lambda: engine.submit(PROMPT, params),
        lambda: engine.generate([PROMPT], params),
        lambda: engine.stream([PROMPT], params),
    ):
        with pytest.raises(ConfigError, match="logit_bias names token 997, the vocabulary has tokens 0 to 996"):
            attempt()
    assert not engine.has_work


# log-probabilities


@pytest.fixture
def small():
    """Engines over a random model with a random EAGLE head, float64."""
    target = random_model(4, vocab_size=31)
    head = with_random_weights(Eagle(replace(target.config, num_layers=1), target), 8)

    def build(**others) -> Engine:
        config = EngineConfig(**(SETTINGS | {"prefill_chunk_tokens": 4} | others))
        draft = None if config.draft == "none" else head
        return Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())

    return target, build


DRAWN = SamplingParams(max_new_tokens=16, temperature=0.9, seed=2, presence_penalty=0.5, logprobs=3)


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"draft": "none"}, {"acceptance": "tree"}, {"acceptance": "rejection", "topk": 1}],
    ids=["match", "no draft", "tree", "rejection"],
)
def test_log_probabilities_are_those_of_a_dense_forward(small, dense_logits, settings, schedule):
    """Of the raw logits, for every token from the prefill's first one on, whatever was drawn, drafted and moved."""
    target, make = small
    engine = make(schedule=schedule, **settings)
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7, 1]]
    for prompt, output in zip(prompts, engine.generate(prompts, DRAWN), strict=True):
        tokens = torch.tensor([*prompt, *output.token_ids])
        wanted = dense_logits(target, tokens).log_softmax(-1)[len(prompt) - 1 : -1]
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        for row, entry in zip(wanted, output.logprobs, strict=True):
            assert math.isclose(entry.logprob, row[entry.token_id], abs_tol=1e-9)
            likeliest = row.topk(3)
            assert [token for token, _ in entry.top] == likeliest.indices.tolist()
            reported = torch.tensor([logprob for _, logprob in entry.top], dtype=torch.float64)
            assert torch.allclose(reported, likeliest.values, rtol=0, atol=1e-9)


def test_each_request_gets_the_log_probabilities_it_asks_for(small):
    """None, the chosen token's alone, or some beside it; events carry one entry a token."""
    _, make = small
    engine = make()
    asked = {engine.submit([5, 6], SamplingParams(max_new_tokens=6, logprobs=n)): n for n in (None, 0, 2)}
    while engine.has_work:
        for event in engine.step():
            wanted = asked[event.request_id]
            if wanted is None:
                assert event.logprobs is None
            else:
                assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
                assert {len(entry.top) for entry in event.logprobs} <= {wanted}
