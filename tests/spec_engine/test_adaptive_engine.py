"""Adaptive steps in the engine: T changes as it runs, and what is verified is what was drafted."""

from __future__ import annotations

from collections import Counter

import pytest

from kvcanary import CanaryConfig
from spec_engine import ConfigError, Engine, EngineConfig, SamplingParams
from spec_engine.memory.sizing import draft_alloc_len, reserve_len
from spec_engine.mock import MockDraft, MockModel, MockTokenizer, TokenOracle, random_model
from spec_engine.models import Standalone
from spec_engine.step.hooks import Forwards

ORACLE = TokenOracle(3, 997)
PROMPTS = [[11, 4, 8, 15, 16, 23, 42], [12, 4], [13, *range(50, 83)]]
ALWAYS = 99  # accept_len of a draft that is right at any depth


def make_engine(candidates, accept_len=ALWAYS, **settings) -> Engine:
    """Chains on a MockModel, drafted by a MockDraft; the canary raises."""
    target = MockModel(ORACLE)
    config = EngineConfig(
        adaptive_steps=candidates,
        **{
            "topk": 1,
            "num_steps": 1,
            "dtype": "float64",
            "max_total_tokens": 4096,
            "context_length": 400,
            "prefix_cache": False,
            "page_size": 4,
            "canary": CanaryConfig(mode="raise", content="full"),
        }
        | settings,
    )
    return Engine(config, model=target, draft=MockDraft(target, accept_len), tokenizer=MockTokenizer())


def generate(engine: Engine, counts: list[int]) -> None:
    """Each prompt goes on for as many tokens as its count, and they are the oracle's."""
    prompts, outputs = PROMPTS[: len(counts)], {}
    names = [
        engine.submit(prompt, SamplingParams(max_new_tokens=count))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    while engine.has_work:
        for event in engine.step():
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
    truth = [ORACLE.continuation(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert [outputs[name] for name in names] == truth


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How many forwards of each kind were opened."""
    counts, inner = Counter(), Forwards.open
    monkeypatch.setattr(Forwards, "open", lambda forwards, batch: counts.update([batch.kind]) or inner(forwards, batch))
    return counts


def check_every_forward(engine: Engine, opened: Counter) -> None:
    """The canary judged what ran, no substep more or less, and lengths were never in doubt."""
    chosen = engine.metrics.adaptive.batches
    num_decodes = sum(chosen.values())
    assert opened["verify"] == num_decodes
    assert opened["draft"] == sum(max(steps - 1, 0) * count for steps, count in chosen.items())
    assert opened["extend"] == num_decodes
    certificate = engine.canary.certificate()
    assert certificate["forwards"] == sum(opened.values())
    assert certificate["findings"] == []
    assert "H1" in certificate["classes"]
    assert certificate["fired"] == {}


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_rise_with_acceptance_and_fall_with_it(opened, page_size, schedule):
    """Drafts that are right up to position 90 and then wrong: T goes 1, 3, 5 and back, and no token changes."""
    engine = make_engine(
        {1: (1, 3, 5)}, lambda request, at: ALWAYS if at < 90 else 1, page_size=page_size, schedule=schedule
    )
    seen, choose = [], engine.adaptive.choose
    engine.adaptive.choose = lambda bs: seen.append(choose(bs)) or seen[-1]
    generate(engine, [140])
    assert [steps for place, steps in enumerate(seen) if not place or steps != seen[place - 1]] == [1, 3, 5, 3, 1]
    assert engine.metrics.adaptive.switches == 4
    assert engine.metrics.adaptive.batches == Counter(seen)
    check_every_forward(engine, opened)


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_without_steps_the_draft_keeps_up(opened, schedule):
    """At T = 0 the target verifies the root alone and the extend still runs: the first draft afterwards is right."""
    engine = make_engine({1: (0, 2)}, lambda request, at: ALWAYS if at > 40 else 1, num_steps=2, schedule=schedule)
    lens, observe = [], engine.adaptive.observe
    engine.adaptive.observe = lambda steps, drafts: lens.append((steps, drafts)) or observe(steps, drafts)
    generate(engine, [120])
    assert {drafts[0] for steps, drafts in lens if steps == 0} == {0}
    again = next(place for place, (steps, _) in enumerate(lens) if steps and place and not lens[place - 1][0])
    assert lens[again] == (2, [2])
    check_every_forward(engine, opened)
    assert engine.metrics.adaptive.batches[0] >= 50


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_each_batch_size_has_its_own_steps(opened, schedule):
    """Three requests draft one step, two draft two, the last drafts four: T follows as requests end."""
    engine = make_engine({1: (4,), 2: (2,), 3: (1,)}, schedule=schedule)
    generate(engine, [61, 41, 21])
    chosen = engine.metrics.adaptive.batches
    assert sorted(chosen) == [1, 2, 4]
    assert engine.metrics.adaptive.switches == 2
    check_every_forward(engine, opened)


def test_everything_is_sized_by_the_longest_draft():
    """Reserve, row width and the most that a step may commit are those of T = 7, whatever num_steps says."""
    engine = make_engine({1: (1, 7), 4: (0,)}, schedule="overlap")
    alloc_len = draft_alloc_len(4, 1, 7, 8)
    assert (engine.sizes.alloc_len, engine.sizes.max_accept) == (alloc_len, 8)
    assert engine.sizes.reserve == reserve_len(alloc_len, 8, 1)
    assert engine.request_table.width == engine.sizes.row_width == 400 + engine.sizes.reserve + 3
    assert engine.scheduler.reserve == engine.sizes.reserve


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_a_standalone_draft_adapts_too(opened, schedule):
    """The entry ahead is there after every switch, from T = 0 too: a draft equal to the target is accepted whole."""
    target = random_model(3, logit_scale=30.0)
    config = EngineConfig(
        draft="standalone",
        dtype="float64",
        topk=1,
        num_steps=2,
        adaptive_steps={1: (2, 4), 2: (0,)},
        schedule=schedule,
        max_total_tokens=1024,
        canary=CanaryConfig(mode="raise", content="full"),
    )
    engine = Engine(config, model=target, draft=Standalone(target, target), tokenizer=MockTokenizer())
    drafts, observe = [], engine.adaptive.observe
    engine.adaptive.observe = lambda steps, accepted: drafts.append((steps, accepted)) or observe(steps, accepted)
    for prompt, count in (([5, 6, 7], 90), ([9, 8], 40)):
        engine.submit(prompt, SamplingParams(max_new_tokens=count))
    while engine.has_work:
        engine.step()
    assert {steps for steps, _ in drafts} == {0, 2, 4}
    assert all(count == steps for steps, accepted in drafts for count in accepted)
    check_every_forward(engine, opened)


def test_a_model_without_a_draft_does_not_adapt():
    """Asking for adaptive steps where nothing drafts is refused at start."""
    config = EngineConfig(topk=1, adaptive_steps=True)
    with pytest.raises(ConfigError, match="adaptive_steps needs a draft, the model has none"):
        Engine(config, model=MockModel(ORACLE), tokenizer=MockTokenizer())
