"""Hybrid and recurrent caches of transformers: right ones are silent, and each way to keep a wrong state is found."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.adapters.transformers import attach
from kvcanary.adapters.transformers.states import states_of

PROMPTS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]])
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4, "expand": 2, "time_step_rank": 2, "num_hidden_layers": 2},
    "Qwen3Next": {
        **ATTENTION,
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Jamba": {
        **ATTENTION,
        **EXPERTS,
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 2,
        "use_mamba_kernels": False,
    },
}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "pad_token_id": 0, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**shape | SHAPES[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {kind: make_model(kind) for kind in SHAPES}


def run(model: Any, **settings: Any) -> torch.Tensor:
    return model.generate(PROMPTS, max_new_tokens=5, do_sample=False, pad_token_id=0, **settings)


def forward(model: Any, tokens: torch.Tensor, cache: Any) -> None:
    """With the cache under the name that this release gives it."""
    names = inspect.signature(model.forward).parameters
    model(tokens, use_cache=True, **{"cache" if "cache" in names else "past_key_values": cache})


def config(content: str = "full") -> CanaryConfig:
    return CanaryConfig(mode="raise", content=content, seed=3)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("content", ["full", "rolling", "write"])
@pytest.mark.parametrize("kind", SHAPES)
def test_right_states_are_silent(models, kind: str, content: str, beams: int) -> None:
    """Greedy and beams: equal tokens, every state judged, K and V of the hybrids besides."""
    model = models[kind]
    expected = run(model, num_beams=beams)
    with attach(model, config(content)) as handle:
        assert torch.equal(run(model, num_beams=beams), expected)
    certificate = handle.certificate()
    assert (certificate["findings"], certificate["unchecked"]) == ([], {})
    assert certificate["states_checked"] >= 4 * 2 * beams
    assert (certificate["slots_checked"] > 0) == (kind != "Mamba")


@pytest.mark.parametrize("content", ["full", "rolling"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_state_that_is_overwritten_between_forwards(models, kind: str, content: str) -> None:
    """R9: layer, row and part are named; row 1 was given the state of row 0, or other bytes."""
    model, seen = models[kind], []

    def strike(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append(1)
        cache = next(v for v in (*kwargs.values(), *output.values()) if isinstance(v, cache_utils.Cache))
        state = next(one for place, one in states_of(cache).items() if "recurrent" in place[1])
        if len(seen) == 2:
            state[1] = state[0] + 1.0

    with attach(model, config(content)):
        hook = model.register_forward_hook(strike, with_kwargs=True)
        with pytest.raises(KVCorruptionError, match="recurrent_states of layer 0") as caught:
            run(model)
        hook.remove()
    finding = caught.value.findings[0]
    assert (finding.code, finding.layer, finding.reader) == ("R9", 0, "row 1")


@pytest.mark.parametrize("kind", SHAPES)
def test_beams_whose_cache_is_not_reordered(models, monkeypatch, kind: str) -> None:
    """transformers#46612: R6 of the first row that goes on from another beam's state."""
    with attach(models[kind], config()):
        monkeypatch.setattr(cache_utils.Cache, "reorder_cache", lambda cache, beams: None)
        monkeypatch.setattr(cache_utils.DynamicCache, "reorder_cache", lambda cache, beams: None, raising=False)
        monkeypatch.setattr(
            "kvcanary.adapters.transformers.canary_cache.CanaryCache.reorder_cache", lambda cache, beams: None
        )
        with pytest.raises(KVCorruptionError) as caught:
            run(models[kind], num_beams=3)
    assert caught.value.findings[0].code == "R6"


@pytest.mark.parametrize("kind", SHAPES)
def test_states_that_are_not_moved_with_their_rows(models, monkeypatch, kind: str) -> None:
    """T1: K and V of the beams were reordered, the states were not."""
    monkeypatch.setattr(cache_utils.LinearAttentionCacheLayerMixin, "reorder_cache", lambda layer, beams: None)
    with attach(models[kind], config()), pytest.raises(KVCorruptionError) as caught:
        run(models[kind], num_beams=3)
    assert caught.value.findings[0].code == "T1"


@pytest.mark.parametrize("kind", ["Qwen3Next", "Jamba"])
def test_rows_that_are_cut_where_states_are_not(models, monkeypatch, kind: str) -> None:
    """R4: a rollback takes tokens from K and V, and the states keep them."""
    model = models[kind]
    monkeypatch.setattr(cache_utils.LinearAttentionCacheLayerMixin, "crop", lambda layer, count: None)
    with attach(model, config()):
        cache = transformers.DynamicCache(config=model.config)
        forward(model, PROMPTS, cache)
        cache.crop(-2)
        with pytest.raises(KVCorruptionError, match="go on from different lengths") as caught:
            forward(model, PROMPTS[:, :1], cache)
    finding = caught.value.findings[0]
    assert (finding.code, finding.expected["absorbed"], finding.found["absorbed"]) == ("R4", 2, 4)


def test_states_that_were_there_before_are_said(models) -> None:
    """A cache that was filled before it was watched is trusted as it is, and counted."""
    model = models["Qwen3Next"]
    cache = transformers.DynamicCache(config=model.config)
    forward(model, PROMPTS, cache)
    with attach(model, config()) as handle:
        forward(model, PROMPTS[:, :1], cache)
    assert handle.certificate()["unchecked"]["recurrent states taken as they lay"] > 0
