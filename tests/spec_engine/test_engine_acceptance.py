"""Acceptance through the engine: every rule, with penalties, under both schedules, and true to the distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.acceptance import rejection, tree_sampling
from spec_engine.mock import MockTokenizer, random_model, with_random_weights
from spec_engine.models.eagle import Eagle
from spec_engine.models.standalone import Standalone

PROMPTS = ["def add(a, b):\n    return a", "import os\n", "class A:\n    def"]
PENALISED = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.4,
    "logit_bias": {200: -1.0, 430: 2.0},
}
KINDS = {
    "greedy": {},
    "greedy, penalised": PENALISED,
    "drawn": {"temperature": 0.8, "top_k": 40, "min_p": 0.02, "seed": 3},
    "drawn, penalised": {"temperature": 0.8, "seed": 3, **PENALISED},
}
RULES = {"match": {}, "tree": {"acceptance": "tree"}, "rejection": {"acceptance": "rejection", "topk": 1}}


def run(kind: str, **settings) -> tuple[list[tuple[int, ...]], Engine]:
    """Tokens of the embedded model in float64, watched by a canary that raises."""
    canary = CanaryConfig(mode="raise")
    engine = Engine(EngineConfig(**({"dtype": "float64", "max_total_tokens": 4096, "canary": canary} | settings)))
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, **KINDS[kind])
    tokens = [output.token_ids for output in engine.generate(PROMPTS, params)]
    assert engine.canary.certificate()["findings"] == []
    return tokens, engine


def tokens_by_request(engine: Engine) -> dict[str, tuple[int, ...]]:
    """What all that is submitted puts out, to the end."""
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] = tokens.get(event.request_id, ()) + event.token_ids
    return tokens


@pytest.fixture(scope="module")
def plain() -> dict[str, list[tuple[int, ...]]]:
    """Tokens without drafting, one request at a time, by kind."""
    return {kind: run(kind, max_running_requests=1, draft="none")[0] for kind in KINDS}


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("kind", KINDS)
def test_matching_equals_no_drafting(plain, kind, schedule):
    """Greedy or drawn, penalised node by node or not: drafts gain tokens and change none; rows are used again."""
    tokens, engine = run(kind, schedule=schedule, max_running_requests=2)
    assert tokens == plain[kind]
    assert engine.metrics.accepted_length > 1.3


def test_the_penalties_change_what_is_drawn(plain):
    """The equalities compare something: with penalties other tokens come."""
    assert plain["greedy"] != plain["greedy, penalised"]
    assert plain["drawn"] != plain["drawn, penalised"]


@pytest.mark.parametrize("rule", ["tree", "rejection"])
def test_overlap_equals_sync(plain, rule):
    """A host that lags draws nothing else; drafts are accepted, and not by comparing them with draws."""
    kind = "drawn, penalised"
    tokens, engine = run(kind, **RULES[rule])
    assert run(kind, schedule="overlap", **RULES[rule])[0] == tokens
    assert tokens != plain[kind]
    assert engine.metrics.accepted_length > 1.3


@pytest.mark.parametrize("rule", RULES)
def test_greedy_requests_walk_greedily_beside_drawn_ones(plain, rule):
    """In a mixed batch a greedy request gets the target's likeliest tokens, whatever rule the others go by."""
    engine = Engine(EngineConfig(dtype="float64", max_total_tokens=4096, **RULES[rule]))
    names = []
    for seed, prompt in enumerate(PROMPTS):
        for kind in ({"temperature": 1.0, "seed": seed}, {}):
            names.append(engine.submit(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True, **kind)))
    tokens = tokens_by_request(engine)
    assert [tokens[name] for name in names[1::2]] == plain["greedy"]
    assert engine.metrics.accepted_length > 1.3


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("rule", "num_slots"), [("match", 96), ("rejection", 56)])
def test_a_retracted_request_keeps_its_counts(plain, rule, num_slots, schedule):
    """Resumed, it is penalised for all that it has put out, the bonus token that waits included."""
    pressed = {"page_size": 4, "num_steps": 3, "max_total_tokens": num_slots, "new_token_ratio": 0.0}
    tokens, engine = run("greedy, penalised", schedule=schedule, **pressed, **RULES[rule])
    assert tokens == plain["greedy, penalised"]
    assert engine.metrics.num_retractions > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_drawn_from_the_target_itself_all_stay(temperature):
    """With q = p nothing is ever rejected, so that every step emits T + 1 tokens: q belongs to the draft it is for."""
    target = random_model(4, vocab_size=31)
    draft, config = Standalone(target, target), EngineConfig(dtype="float64", num_steps=3, **RULES["rejection"])
    engine = Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())
    for seed in range(3):
        params = SamplingParams(max_new_tokens=21, temperature=temperature, top_p=0.9, seed=seed)
        engine.submit([seed, 1, 4], params)
    while engine.has_work:
        engine.step()
    assert engine.metrics.accepted_length == 4


def test_chains_of_any_length_may_be_drawn():
    """Adaptive steps, 0 among them, under rejection sampling: all runs whole, and greedy output stays what it was."""
    target = random_model(4, vocab_size=31)
    head = with_random_weights(Eagle(replace(target.config, num_layers=1), target), 8)
    tokens = []
    for adaptive in (None, {1: (0, 1, 3)}):
        canary = CanaryConfig(mode="raise")
        settings = {"dtype": "float64", "num_steps": 3, "adaptive_steps": adaptive or False, "canary": canary}
        config = EngineConfig(**settings, **RULES["rejection"])
        engine = Engine(config, model=target, draft=head, tokenizer=MockTokenizer())
        for temperature in (0.0, 0.7):
            engine.submit([5, 6], SamplingParams(max_new_tokens=60, temperature=temperature))
        tokens.append(tokens_by_request(engine)["req-0"])
    assert len(tokens[0]) == 60
    assert tokens[0] == tokens[1]
    assert engine.metrics.adaptive.batches[0] > 0


# the distribution, through prefill, drafting, verify and extend

VOCAB, NUM_DRAWS, PROMPT = 6, 1000, [3, 1, 4, 1]


@pytest.fixture
def small():
    """Engines over a random model of six tokens with a random EAGLE head."""
    target = random_model(4, vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=64, logit_scale=0.7)
    head = with_random_weights(Eagle(replace(target.config, num_layers=1), target), 8)
    settings = {"dtype": "float64", "max_total_tokens": 16384, "max_running_requests": 250, "page_size": 1}

    def build(**rule) -> Engine:
        config = EngineConfig(num_steps=2, **(settings | rule))
        return Engine(config, model=target, draft=head, tokenizer=MockTokenizer())

    return target, build


def p_value(engine: Engine, exact: torch.Tensor, num_draws: int) -> float:
    """Of Pearson's chi-square of the second and third token against the exact joint distribution."""
    for seed in range(num_draws):
        engine.submit(PROMPT, SamplingParams(max_new_tokens=3, seed=seed, temperature=1.0))
    pairs = torch.tensor([tokens[1] * VOCAB + tokens[2] for tokens in tokens_by_request(engine).values()])
    expected = exact * num_draws
    assert expected.min() > 5
    statistic = ((torch.bincount(pairs, minlength=VOCAB**2) - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((VOCAB**2 - 1) / 2, dtype=torch.float64), statistic / 2).item()


def joint(target, dense_logits) -> torch.Tensor:
    """``[V * V]``: the second and third token's distribution, from dense forwards of every continuation."""
    grid = torch.cartesian_prod(*[torch.arange(VOCAB)] * 2)
    prompts = torch.cat((torch.tensor(PROMPT).expand(len(grid), -1), grid), 1)
    probs = torch.stack([dense_logits(target, row).softmax(-1) for row in prompts])  # [V * V, L + 2, V]
    first, second, third = (probs[:, len(PROMPT) - 1 + place] for place in range(3))
    rows = torch.arange(len(grid))
    weight = first[rows, grid[:, 0]] * second[rows, grid[:, 1]]
    return (weight[:, None] * third).view(VOCAB, VOCAB, VOCAB).sum(0).flatten()


@pytest.mark.parametrize("settings", [RULES["tree"] | {"topk": 2}, RULES["rejection"]], ids=["tree", "rejection"])
def test_every_rule_keeps_the_targets_distribution(small, dense_logits, settings):
    """1,000 draws of two tokens behind the first one are distributed as the target's."""
    target, make = small
    assert p_value(make(**settings), joint(target, dense_logits), NUM_DRAWS) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "settings"), [(tree_sampling, RULES["tree"] | {"topk": 2}), (rejection, RULES["rejection"])]
)
def test_a_rule_without_its_residual_does_not(small, dense_logits, monkeypatch, module, settings):
    """The test above has power: the bonus drawn from the target itself is found."""
    target, make = small
    monkeypatch.setattr(module, "residual", lambda probs, *args: probs)
    assert p_value(make(**settings), joint(target, dense_logits), 3 * NUM_DRAWS) < 1e-6
