"""Drafting changes no token on a GPU: exactly so in float32, and in bfloat16 wherever one token is clearly the best."""

from __future__ import annotations

import random

import pytest

from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

pytestmark = pytest.mark.gpu
GRID = [
    {"page_size": page_size, "topk": topk, "num_steps": num_steps, "schedule": schedule, "graphs": graphs}
    for page_size in (1, 4, 16, 64)
    for topk in (1, 2, 4, 8)
    for num_steps in (1, 2, 3, 5)
    for schedule in ("sync", "overlap")
    for graphs in ("off", "on")
]
CHOSEN = random.Random(7).sample(GRID, 12)
PROMPTS = [excerpt.prompt[:100] for excerpt in load_excerpts()[:24]]
NEW_TOKENS = 48
NEAR = 1e-2  # logits, which are float32, this near may change places with the shapes of the products before them


def generate(**settings: object) -> list:
    settings = {"max_total_tokens": 4096, "context_length": 256, "max_running_requests": 8, "device": "cuda"} | settings
    logprobs = 2 if settings.get("draft") == "none" else None
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=logprobs)
    return Engine(EngineConfig(**settings)).generate(PROMPTS, params)


@pytest.fixture(scope="module")
def plain() -> dict[str, list]:
    """Outputs without drafting, by number type."""
    return {dtype: generate(draft="none", dtype=dtype) for dtype in ("float32", "bfloat16")}


def name(settings: dict) -> str:
    return "P{page_size}-K{topk}-T{num_steps}-{schedule}-graphs-{graphs}".format(**settings)


@pytest.mark.parametrize("settings", CHOSEN, ids=name)
def test_float32_is_equal(plain, settings) -> None:
    """Eight requests at a time, pages, widths, depths, schedules, with graphs and without."""
    drafted = generate(dtype="float32", **settings)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain["float32"]]


def gap(output, position: int) -> float:
    """Between the two best logits where plain decoding chose its token."""
    best, second = output.logprobs[position].top[:2]
    return best[1] - second[1]


@pytest.mark.parametrize("settings", CHOSEN[:4], ids=name)
def test_bfloat16_differs_only_at_near_ties(plain, settings, capsys) -> None:
    """Up to two logits that are NEAR each output is equal; how many differ from there on is printed, and their gaps."""
    gaps = []
    for drafted, own in zip(generate(dtype="bfloat16", **settings), plain["bfloat16"], strict=True):
        differing = [i for i, pair in enumerate(zip(drafted.token_ids, own.token_ids, strict=True)) if len({*pair}) > 1]
        gaps += [gap(own, position) for position in differing[:1]]
    with capsys.disabled():
        print(f"\nbfloat16, {name(settings)}: {len(gaps)} of {len(PROMPTS)} outputs differ, gaps {gaps}")
    assert [size for size in gaps if size >= NEAR] == []
