"""A small model of its own as the draft: its pool is one entry ahead of the target's in everything."""

from __future__ import annotations

import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Decoder, Standalone

TARGET = random_model(3, logit_scale=30.0, max_position_embeddings=128)
STRANGER = random_model(4, logit_scale=30.0, max_position_embeddings=128)
PROMPTS = [[5, 6, 7], [9] * 17 + [2], [30, 31, 32, 33, 34]]
RAISE = CanaryConfig(mode="raise", content="full")


def make_engine(draft: Decoder | None = TARGET, *, canary: CanaryConfig = RAISE, **settings) -> Engine:
    """An engine on the random target, for which ``draft`` drafts; prompts come in chunks of 8 tokens."""
    config = EngineConfig(
        draft="none" if draft is None else "standalone",
        dtype="float64",
        canary=canary,
        **{"max_total_tokens": 2048, "prefill_chunk_tokens": 8} | settings,
    )
    standalone = None if draft is None else Standalone(draft, TARGET)
    return Engine(config, model=TARGET, draft=standalone, tokenizer=MockTokenizer())


def run(engine: Engine, count: int, prompts=PROMPTS) -> list[tuple[int, ...]]:
    params = SamplingParams(max_new_tokens=count)
    return [output.token_ids for output in engine.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    """Greedy output without drafting."""
    return run(make_engine(None, canary=CanaryConfig(mode="off")), 34)


def cut(outputs: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    return [output[:count] for output in outputs]


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_chain_by_the_target_itself_is_accepted_whole(plain, page_size, num_steps, schedule):
    """Each verify emits T + 1 tokens, those of plain decoding, and the canary has nothing to say."""
    engine = make_engine(page_size=page_size, topk=1, num_steps=num_steps, schedule=schedule)
    count = 1 + 3 * (num_steps + 1)  # the prefill's token, then whole steps
    assert run(engine, count) == cut(plain, count)
    assert engine.metrics.accepted_length == num_steps + 1


@pytest.mark.parametrize("backend", ["torch", "paged", "dense"])
@pytest.mark.parametrize(("page_size", "topk", "num_steps"), [(1, 3, 1), (1, 2, 4), (4, 4, 3), (16, 3, 4)])
def test_trees_by_the_target_itself_are_accepted_whole(plain, page_size, topk, num_steps, backend):
    """A sure target's own tree holds its choices; branches, copies of tails and ancestors lie one entry further on."""
    engine = make_engine(
        page_size=page_size,
        topk=topk,
        num_steps=num_steps,
        num_draft_tokens=num_steps + 1 + (topk > 2),
        attention_backend=backend,
    )
    count = 1 + 3 * (num_steps + 1)
    assert run(engine, count) == cut(plain, count)
    assert engine.metrics.accepted_length > num_steps


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "topk"), [(1, 1), (4, 3)])
def test_a_draft_of_other_weights_changes_no_token(plain, page_size, topk, schedule):
    """Nearly every draft is refused, so entries beyond the committed ones are written over in each step."""
    engine = make_engine(STRANGER, page_size=page_size, topk=topk, num_steps=3, schedule=schedule)
    assert run(engine, 34) == plain
    assert engine.metrics.accepted_length < 1.5


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_cached_prefixes_are_right_one_entry_ahead(page_size, schedule):
    """Prompts that go on as an earlier one did, or leave it at a page's end, read its pages and miss no acceptance."""
    first = [5, 6, 7, 8, 9, 10, 11, 12]
    prompts = [first, [*first, 20, 21], [*first[:4], 30], first]
    engine = make_engine(page_size=page_size, topk=1, num_steps=3, schedule=schedule)
    fresh = make_engine(None, canary=CanaryConfig(mode="off"), prefix_cache=False)
    for prompt in prompts:
        assert run(engine, 9, [prompt]) == run(fresh, 9, [prompt])
    assert engine.metrics.accepted_length == 4
    assert engine.metrics.prefill_tokens < sum(len(prompt) for prompt in prompts)


def test_a_retracted_request_resumes_one_entry_ahead(plain):
    """A pool too small for all makes some give up their pages; none loses a token or a draft."""
    engine = make_engine(page_size=4, topk=1, num_steps=3, max_total_tokens=80, new_token_ratio=0.0)
    assert run(engine, 33) == cut(plain, 33)
    assert engine.metrics.num_retractions
    assert engine.metrics.accepted_length == 4


@pytest.mark.parametrize(("page_size", "topk"), [(1, 1), (16, 3)])
def test_a_request_may_fill_the_context(page_size, topk):
    """Prompt and output take all 128 positions, and the prompt's last page is followed by the entry ahead."""
    prompt = [token % 97 for token in range(0, 7 * 112, 7)]
    settings = {"page_size": page_size, "topk": topk, "num_steps": 5}
    [output] = run(make_engine(**settings), 16, [prompt])
    assert [output] == run(make_engine(None, canary=CanaryConfig(mode="off")), 16, [prompt])
    assert len(prompt) + len(output) == 128
