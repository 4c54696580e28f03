"""Pages of hundreds of slots with several branches: a long prompt, and a conversation that comes back to it.

The two reproductions of sgl-project/sglang#26972, where pages of 256 overflowed the row of a request.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Standalone

NEW_TOKENS, QUESTION, MOST_TOKENS = 24, 30, 2048


def model():
    return random_model(5, logit_scale=20.0, max_position_embeddings=MOST_TOKENS)


def engine_with(page_size: int, **settings) -> Engine:
    """Room for two requests; each branch of a draft takes pages of its own."""
    target = model()
    drafts = Standalone(target, target) if settings.get("draft") == "standalone" else None
    config = EngineConfig(
        page_size=page_size,
        dtype="float64",
        context_length=MOST_TOKENS,
        max_running_requests=2,
        max_total_tokens=32 * page_size,
        canary=CanaryConfig(mode="raise", content="full", seed=1),
        **settings,
    )
    return Engine(config, model=target, draft=drafts, tokenizer=MockTokenizer())


def converse(engine: Engine, page_size: int) -> list[list[int]]:
    """A prompt of two pages and some tokens; then the same with its answer and a second question behind it."""
    generator, params = torch.Generator().manual_seed(2), SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    prompt, question = (torch.randint(97, (n,), generator=generator).tolist() for n in (2 * page_size + 5, QUESTION))
    (first,) = engine.generate([prompt], params)
    (second,) = engine.generate([[*prompt, *first.token_ids, *question]], params)
    return [list(first.token_ids), list(second.token_ids)]


def cases():
    """Pages of 256; those of 512, where a prompt is twice as long, in `make test-all`."""
    for case in itertools.product((256, 512), ("torch", "paged"), ("sync", "overlap")):
        yield pytest.param(*case, marks=pytest.mark.slow if case[0] == 512 else ())


@pytest.mark.parametrize(("page_size", "backend", "schedule"), list(cases()))
def test_a_long_prompt_and_a_second_turn_are_those_of_plain_decoding(page_size, backend, schedule) -> None:
    """Every token is the undrafted one, the second turn hits the pages of the first, and no check fires."""
    drafted = engine_with(
        page_size,
        draft="standalone",
        topk=4,
        num_steps=3,
        num_draft_tokens=8,
        attention_backend=backend,
        schedule=schedule,
    )
    assert converse(drafted, page_size) == converse(engine_with(page_size, draft="none"), page_size)
    assert drafted.metrics.accepted_length > 2
    whole = 2 * page_size + 5
    assert drafted.metrics.prefill_tokens == whole + (whole + NEW_TOKENS + QUESTION - 2 * page_size)
    assert drafted.canary.certificate()["findings"] == []
