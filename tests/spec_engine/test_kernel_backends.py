"""The engine by kernels: the tokens of torch attention, drafted or not, and a canary that has nothing to say."""

from __future__ import annotations

import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.attention.backends import BACKENDS
from spec_engine.models.embedded import load_excerpts

FLOAT32 = [name for name, backend in BACKENDS.items() if backend.needs.cuda and "float32" in backend.needs.dtypes]


def tokens_on_cuda(backend: str, **settings) -> list[tuple[int, ...]]:
    """Greedy tokens of three prompts of unequal length, under a canary that raises."""
    canary = CanaryConfig(mode="raise", content="full")
    config = EngineConfig(
        attention_backend=backend, device="cuda", canary=canary, max_total_tokens=4096, prefix_cache=False, **settings
    )
    engine = Engine(config)
    prompts = [engine.tokenizer.encode(excerpt.prompt) for excerpt in load_excerpts()[:3]]
    prompts = [prompt[-keep:] for prompt, keep in zip(prompts, (64, 90, 17), strict=True)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=48, ignore_eos=True))
    assert engine.canary.certificate()["findings"] == []
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", ["triton", "triton-paged"])
def test_interpreted_kernels_give_the_tokens_of_torch(name, toy_model) -> None:
    """A prompt, two drafted steps over a tree on pages, in float32 on the CPU."""
    outputs = []
    for backend in ("torch", name):
        settings = {"page_size": 4, "topk": 2, "num_steps": 2, "num_draft_tokens": 4, "max_total_tokens": 128}
        engine = Engine(EngineConfig(model=str(toy_model), attention_backend=backend, **settings))
        outputs.append(engine.generate([[7, 3, 11, 5, 2]], SamplingParams(max_new_tokens=3, ignore_eos=True)))
    assert outputs[0][0].token_ids == outputs[1][0].token_ids


@pytest.fixture(scope="module")
def undrafted() -> list[tuple[int, ...]]:
    """What torch attention gives without drafts."""
    return tokens_on_cuda("torch", draft="none")


@pytest.mark.gpu
@pytest.mark.parametrize(("page_size", "topk"), [(1, 4), (16, 1), (16, 4), (64, 2)])
@pytest.mark.parametrize("name", FLOAT32)
def test_drafted_tokens_equal_undrafted_ones(name, page_size, topk, undrafted) -> None:
    """Greedy, in float32."""
    assert tokens_on_cuda(name, page_size=page_size, topk=topk) == undrafted


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLOAT32)
def test_undrafted_tokens_equal_those_of_torch(name, undrafted) -> None:
    """Plain decoding, in float32."""
    assert tokens_on_cuda(name, draft="none") == undrafted


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("name", [*FLOAT32, pytest.param("flashinfer", marks=pytest.mark.package("flashinfer"))])
def test_bf16_is_served_whole_and_unharmed(name, topk) -> None:
    """Every token that was asked for, and no finding; which tokens, rounding may decide."""
    assert [len(tokens) for tokens in tokens_on_cuda(name, dtype="bfloat16", topk=topk)] == [48] * 3
