"""A draft that equals its target loses nothing: every verify emits T + 1 tokens, or acceptance leaks somewhere."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
import torch

from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock import KnownDraft, KnownText, MockTokenizer, known_text, random_model
from spec_engine.models.standalone import Standalone

STEPS = 4  # verifies of each request
SURE_SCALE = 2000.0  # at which the model gives every token of the texts 0.9 or more
SHAPES = [(page_size, num_steps) for page_size in (1, 4, 16, 64) for num_steps in (1, 2, 3, 5)]


@cache
def model(logit_scale: float):
    return random_model(8, logit_scale=logit_scale)


@cache
def texts(logit_scale: float) -> list[KnownText]:
    prompts = [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 16, 33)]
    return [known_text(model(logit_scale), prompt, 48) for prompt in prompts]


def steps_of(logit_scale: float, num_steps: int, draft=None, **settings) -> list[list[int]]:
    """How many tokens each step of each request emitted; the tokens must be the known ones."""
    draft = draft or KnownDraft(model(logit_scale), texts(logit_scale), num_steps + 1)
    config = EngineConfig(num_steps=num_steps, dtype="float64", context_length=256, **settings)
    engine = Engine(config, model=model(logit_scale), draft=draft, tokenizer=MockTokenizer())
    count = 1 + STEPS * (num_steps + 1)
    emitted: dict[str, list[int]] = defaultdict(list)
    steps: dict[str, list[int]] = defaultdict(list)
    for event in engine.stream([known.prompt for known in texts(logit_scale)], SamplingParams(max_new_tokens=count)):
        emitted[event.request_id] += event.token_ids
        steps[event.request_id].append(len(event.token_ids))
    assert list(emitted.values()) == [known.continuation[:count] for known in texts(logit_scale)]
    return list(steps.values())


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "num_steps"), SHAPES)
def test_a_chain_is_accepted_whole(page_size: int, num_steps: int, schedule: str) -> None:
    """K = 1: the prefill's token, then T + 1 tokens a step, however sure the model is."""
    steps = steps_of(1.0, num_steps, page_size=page_size, topk=1, schedule=schedule)
    assert steps == [[1] + [num_steps + 1] * STEPS] * 3


@pytest.mark.parametrize("topk", [2, 4])
@pytest.mark.parametrize(("page_size", "num_steps"), SHAPES)
def test_a_tree_of_sure_guesses_is_accepted_whole(page_size: int, num_steps: int, topk: int) -> None:
    """K > 1: the same for every N from T + 1 on, with a draft that gives the true token 0.9 or more."""
    for num_nodes in sorted({num_steps + 1, topk + (num_steps - 1) * topk**2 + 1}):
        steps = steps_of(SURE_SCALE, num_steps, page_size=page_size, topk=topk, num_draft_tokens=num_nodes)
        assert steps == [[1] + [num_steps + 1] * STEPS] * 3


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "topk", "num_steps"), [(1, 1, 3), (4, 1, 5), (16, 1, 2), (4, 2, 3), (16, 4, 2)])
def test_the_target_drafts_for_itself(page_size: int, topk: int, num_steps: int, schedule: str) -> None:
    """A standalone draft with the target's weights, which knows nothing beforehand, loses no token either."""
    scale = 1.0 if topk == 1 else SURE_SCALE
    draft = Standalone(random_model(8, logit_scale=scale), model(scale))
    if topk > 1:
        for known in texts(scale):
            probs = torch.softmax(model(scale).logits(known.hidden[len(known.prompt) - 1 :]), -1)
            assert probs.amax(-1).min() >= 0.9
    settings = {"page_size": page_size, "topk": topk, "num_draft_tokens": num_steps + 1, "schedule": schedule}
    assert steps_of(scale, num_steps, draft, **settings) == [[1] + [num_steps + 1] * STEPS] * 3
