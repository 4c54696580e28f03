"""A pool under pressure loses no token: requests are retracted in mid-draft and go on as if nothing had been."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.config import DEFAULT_NODES
from spec_engine.memory.sizing import draft_alloc_len, pages_for, reserve_len

PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (9, 14, 30, 42)
]
SHAPES = [(4, 4, 2), (16, 2, 5), (16, 8, 1)]  # P, K, T
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3)


def run(folder, params: SamplingParams, pages: int, **settings) -> tuple[list[tuple[int, ...]], Engine]:
    """Outputs with a pool of so many pages, of which prompts alone decide who is admitted."""
    page_size = settings.setdefault("page_size", 16)
    config = EngineConfig(
        model=str(folder),
        dtype="float64",
        max_total_tokens=pages * page_size,
        prefill_chunk_tokens=20,
        new_token_ratio=0.0,
        **settings,
    )
    engine = Engine(config)
    outputs = engine.generate(PROMPTS, params)
    assert {output.finish_reason for output in outputs} == {"length"}
    return [output.token_ids for output in outputs], engine


def pages_of_prompts(page_size: int, topk: int, num_steps: int, schedule: str, **_) -> int:
    """A pool in which all requests can begin, and none can grow."""
    nodes = min(DEFAULT_NODES, topk + (num_steps - 1) * topk**2 + 1)
    alloc_len = draft_alloc_len(page_size, topk, num_steps, nodes)
    reserve = reserve_len(alloc_len, num_steps + 1, int(schedule == "overlap"))
    return sum(pages_for(len(prompt), reserve, page_size) for prompt in PROMPTS)


@pytest.fixture(scope="module")
def expected(toy_model) -> dict[SamplingParams, list[tuple[int, ...]]]:
    """Outputs without drafting, of a pool that holds everybody."""
    return {params: run(toy_model, params, 256, draft="none")[0] for params in (GREEDY, SAMPLED)}


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("page_size", "topk", "num_steps"), SHAPES)
def test_retracted_requests_lose_no_token(toy_model, expected, page_size, topk, num_steps, schedule) -> None:
    """Outputs of a pool in which nobody can grow are those of an unpressed run, and the canary finds nothing."""
    settings = {"page_size": page_size, "topk": topk, "num_steps": num_steps, "schedule": schedule}
    canary = CanaryConfig(mode="raise", content="full")
    outputs, engine = run(toy_model, GREEDY, pages_of_prompts(**settings), canary=canary, **settings)
    assert outputs == expected[GREEDY]
    assert engine.metrics.num_retractions > 0
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("draft", ["eagle", "eagle3"])
def test_sampled_tokens_are_drawn_once(toy_model, expected, draft, schedule) -> None:
    """A request that resumes draws with the coins of its positions, so seeded output is the unpressed one too."""
    settings = {"page_size": 4, "topk": 2, "num_steps": 2, "schedule": schedule, "draft": draft}
    outputs, engine = run(toy_model, SAMPLED, pages_of_prompts(**settings), **settings)
    assert outputs == expected[SAMPLED]
    assert engine.metrics.num_retractions > 0


def test_without_pressure_nobody_is_retracted(toy_model) -> None:
    """The twin: the same requests in a pool that holds them."""
    assert run(toy_model, GREEDY, 256, topk=2)[1].metrics.num_retractions == 0


def test_requests_that_come_back_together_do_not_read_each_other(toy_model) -> None:
    """Two of one prompt are retracted and resume in the same step: the first finds nothing yet in the second."""
    config = EngineConfig(model=str(toy_model), page_size=4, dtype="float64")
    engine = Engine(config)
    engine.submit(PROMPTS[0], GREEDY, priority=1)
    twins = [engine.submit(PROMPTS[1], GREEDY) for _ in range(2)]
    outputs: dict[str, list[int]] = {name: [] for name in ("req-0", *twins)}
    for number in itertools.count():
        if number == 4:
            assert engine._retract() + engine._retract() == []
            assert [request.request_id for request in engine.scheduler.waiting] == twins
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
        if not engine.has_work:
            break
    assert tuple(outputs["req-0"]) == engine.generate(PROMPTS[:1], GREEDY)[0].token_ids
    assert outputs[twins[0]] == outputs[twins[1]]
    assert len(outputs[twins[0]]) == GREEDY.max_new_tokens
