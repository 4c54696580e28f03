"""Greedy output with drafting equals output without, token for token, on the trained model in float64."""

import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

PARAMS = SamplingParams(max_new_tokens=32, ignore_eos=True)
SHORT, LONG = slice(20, 22), slice(20, 32)
LENGTHS = [pytest.param(SHORT, id="2-prompts"), pytest.param(LONG, id="12-prompts", marks=pytest.mark.slow)]


def run(prompts: slice, **settings) -> tuple[list[tuple[int, ...]], Engine]:
    engine = Engine(EngineConfig(dtype="float64", max_total_tokens=8192, **settings))
    outputs = engine.generate([excerpt.prompt for excerpt in load_excerpts()[prompts]], PARAMS)
    return [output.token_ids for output in outputs], engine


@pytest.fixture(scope="module")
def plain() -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Outputs without drafting, by the slice of prompts."""
    return {}


@pytest.mark.parametrize("prompts", LENGTHS)
@pytest.mark.parametrize("num_steps", [1, 3, 5])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_drafting_equals_no_drafting(plain, page_size, topk, num_steps, prompts):
    """Whatever the tree and the page, drafting gains tokens and changes none; the canary agrees."""
    key = (prompts.start, prompts.stop)
    if key not in plain:
        plain[key] = run(prompts, draft="none")[0]
    canary = CanaryConfig(mode="raise")
    outputs, engine = run(prompts, page_size=page_size, topk=topk, num_steps=num_steps, canary=canary)
    assert outputs == plain[key]
    assert engine.metrics.accepted_length > 1.3
    assert engine.canary.certificate()["findings"] == []


def test_the_tree_beats_the_chain_and_three_tokens_a_verify():
    """EAGLE-3 with topk 4, 5 steps, 16 nodes emits at least 3 tokens a verify, more than a chain of 5 steps."""
    prompts = [excerpt.prompt for excerpt in load_excerpts()[:10]]
    accepted = {}
    for topk, nodes in ((1, 6), (4, 16)):
        config = EngineConfig(draft="eagle3", topk=topk, num_steps=5, num_draft_tokens=nodes, max_total_tokens=16384)
        engine = Engine(config)
        engine.generate(prompts, SamplingParams(max_new_tokens=64))
        accepted[topk] = engine.metrics.accepted_length
    assert accepted[4] >= 3.0
    assert accepted[4] > accepted[1]
