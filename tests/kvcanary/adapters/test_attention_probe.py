"""What a transformers model's attention really reads, asked when a canary is attached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, cache_utils, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.adapters.transformers import attach, attention_probe
from kvcanary.adapters.transformers.attention_probe import PADDING, WINDOW, probe, why_not
from kvcanary.adapters.transformers.unwatched import cache_argument

from .test_transformers_prompts import make

FAMILIES = ("Llama", "Qwen2", "Qwen3")
right_sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_attention_is_silent(models, family: str, implementation: str, dtype: torch.dtype) -> None:
    """Of every implementation and type; queries with a norm too."""
    model = models(family).to(dtype)
    model.set_attn_implementation(implementation)
    assert why_not(model) is None
    assert probe(model) is None


def test_what_autocast_rounds_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 32 bits whose attention runs in bfloat16: what that gives says how near is near."""
    monkeypatch.setattr(attention_probe, "NEAR", 1e-6)
    for seed in range(12):
        model = make("LlamaConfig", MANY_HEADS, seed=seed)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[:8] *= 20
        with torch.autocast("cpu", torch.bfloat16):
            assert probe(model) is None


@pytest.mark.parametrize("part", ["k_proj", "v_proj", "q_proj"])
def test_what_is_not_finite_is_not_near(models, part: str) -> None:
    """Keys of NaN make all that attention gives NaN, also what it is to give."""
    model = models()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, part).weight.fill_(torch.nan)
    found = probe(model)
    assert (found is None) == (part != "k_proj")  # what the others give is replaced
    assert found is None or found.layer == 1


MANY_HEADS = {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 16}


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)], ids=["8", "32 more"])
def test_16_bit_models_of_many_weights_are_silent(seeds: range) -> None:
    """Eager attention rounds scores and weights too; some heads have keys that are much longer than those of others."""
    for seed in seeds:
        model = make("LlamaConfig", MANY_HEADS, seed=seed)
        with torch.no_grad():
            for layer in model.model.layers[seed % 2 :: 2]:
                layer.self_attn.k_proj.weight[:8] *= 20
        model.set_attn_implementation("eager")
        for dtype in torch.bfloat16, torch.float16:
            assert probe(model.to(dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_several_explanations_the_nearest_is_told(dtype: torch.dtype) -> None:
    """Where values round coarsely, more than one fits: a missing scale is no other rotation."""
    for seed in range(12):
        with attending(no_scale):
            assert "scale of the scores is missing" in probe(make("LlamaConfig", {}, seed=seed).to(dtype)).text


def test_a_probe_leaves_the_model_as_it_was(models) -> None:
    """What it gives afterwards is what it gave before, and no hook is left; the certificate counts the probe."""
    model, ids = models(), torch.tensor([[3, 1, 4, 1, 5]])
    before = model(ids).logits
    with attach(model, CanaryConfig(mode="log", content="full")) as handle:
        assert handle.certificate()["reader_probes"] == 1
        assert handle.findings == []
    assert torch.equal(model(ids).logits, before)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@contextmanager
def rotating_queries_by(shift: int, model: Any) -> Iterator[None]:
    """Queries are rotated for another position, keys for their own, as where an offset moved on between both."""
    module = sys.modules[type(model).__module__]
    right_rotation = module.apply_rotary_pos_emb

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> Any:
        _, keys = right_rotation(q, k, cos, sin, *rest)
        half = cos.shape[-1] // 2
        angle = torch.atan2(sin, cos)[:, :, :half]
        step = 1e4 ** (-torch.arange(half) * 2 / cos.shape[-1])
        moved = torch.cat((angle + shift * step,) * 2, -1)
        queries, _ = right_rotation(q, k, moved.cos(), moved.sin(), *rest)
        return queries.to(q.dtype), keys

    module.apply_rotary_pos_emb = rotate
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = right_rotation


@pytest.mark.parametrize(("shift", "position"), [(1, 1), (-1, 1), (3, 1)])
def test_a_query_rotated_for_another_position_is_named(models, shift: int, position: int) -> None:
    """R4 before anything is served: which position, and which one its query was rotated for."""
    model = models()
    with rotating_queries_by(shift, model), pytest.raises(KVCorruptionError) as raised:
        attach(model, CanaryConfig(mode="raise"))
    [found] = raised.value.findings
    assert (found.code, found.position, found.layer) == ("R4", position, 0)
    assert found.found["position"] == position + shift
    assert f"was rotated for position {position + shift}" in found.causes[0].text
    with attach(model) as handle:  # nothing was left attached
        assert handle.findings == []


@pytest.mark.parametrize("part", ["keys", "queries"])
def test_what_is_rotated_in_part_is_named(models, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sine is left out: of one key alone that would cancel out."""
    model = models()
    module = sys.modules[type(model).__module__]
    rotate = module.apply_rotary_pos_emb

    def partly(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> Any:
        whole, halves = rotate(q, k, cos, sin, *rest), rotate(q, k, cos, torch.zeros_like(sin), *rest)
        return (whole[0], halves[1]) if part == "keys" else (halves[0], whole[1])

    assert probe(model) is None
    monkeypatch.setattr(module, "apply_rotary_pos_emb", partly)
    found = probe(model)
    assert found is not None
    assert (found.layer, found.family) == (0, "scales")


@contextmanager
def attending(change: Callable[..., Any]) -> Iterator[None]:
    """`change` stands before the real attention, and gives its arguments."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return right_sdpa(*change(module, query, key, value, mask, kwargs), **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = right_sdpa


def no_scale(module: Any, query: Any, key: Any, value: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    kwargs["scaling"] = 1.0
    return module, query, key, value, mask


def one_behind(module: Any, query: Any, key: Any, value: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    count, total = query.shape[2], key.shape[2]
    seen = torch.arange(total) <= torch.arange(count)[:, None] + total - count + 1
    return module, query, key, value, seen[None, None]


def without_the_first(module: Any, query: Any, key: Any, value: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    count, total = query.shape[2], key.shape[2]
    line, own = torch.arange(total), torch.arange(count)[:, None] + total - count
    return module, query, key, value, ((line <= own) & ((line > 0) | (own == 0)))[None, None]


#: Types whose attention is the function of a Llama, a Qwen or a Cohere, and what their shapes have besides.
ALIKE: dict[str, dict[str, Any]] = {
    **{family: {} for family in ("Arcee", "Cwm", "Ernie4_5", "Gemma", "Glm4", "Helium", "Jais2", "Ministral")},
    "Bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1, 3]},
    "Ernie4_5_Moe": {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "Glm4Moe": {"n_routed_experts": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    "GraniteMoe": {"attention_multiplier": 0.2},
    "Phimoe": {"sliding_window": 64},
    "Qwen3Moe": {"num_experts": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("family", ALIKE)
def test_models_whose_attention_is_that_of_others_are_asked(family: str) -> None:
    """In silence, in every implementation; a scale that is missing and a mask that lets in too much are named."""
    for dtype in torch.float32, torch.bfloat16:
        for implementation in "eager", "sdpa":
            model = make(f"{family}Config", ALIKE[family]).to(dtype)
            model.set_attn_implementation(implementation)
            assert (why_not(model), probe(model)) == (None, None)
    with attending(no_scale):
        assert "scale of the scores is missing" in probe(model).text
    with attending(one_behind):
        assert "read 1 entries behind it" in probe(model).text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (no_scale, "the scale of the scores is missing"),
        (one_behind, "read 1 entries behind it as well"),
        (without_the_first, "left out the first 1 entries"),
    ],
)
def test_what_attention_does_instead_is_named(models, change: Callable[..., Any], text: str) -> None:
    """The scale, and masks that let in or hide entries; mode log tells it, and the model is watched all the same."""
    with attending(change), attach(models(), CanaryConfig(mode="log")) as handle:
        [found] = handle.findings
    assert found.code == "R4"
    assert text in found.causes[0].text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "another"}, "that of a another was not tried"),
        ({"attn_logit_softcapping": 30.0}, "it has attn_logit_softcapping"),
    ],
)
def test_a_model_that_cannot_be_asked_is_watched_and_says_so(models, change: dict[str, Any], reason: str) -> None:
    """Its certificate has the reason; nothing is asked of it, and nothing found."""
    model = models()
    for name, value in change.items():
        setattr(model.config, name, value)
    with attach(model, CanaryConfig(mode="raise")) as handle:
        told = handle.certificate()
    assert told["reader_probes"] == f"attention not probed: {reason}"
    assert told["unchecked"] == {}


WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 8},
    "Ministral": {"sliding_window": 5000},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "Cwm": {"sliding_window": 40, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
}


def begins_elsewhere(monkeypatch: pytest.MonkeyPatch, kind: str, wrong: Callable[[int], int]) -> None:
    """Masks of such layers of a cache begin where `wrong` says."""
    layer = getattr(cache_utils, kind)
    right = layer.get_mask_sizes

    def sizes(own: Any, *args: Any) -> tuple[int, int]:
        length, first = right(own, *args)
        return length, wrong(first)

    monkeypatch.setattr(layer, "get_mask_sizes", sizes)


@pytest.mark.parametrize("family", WINDOWED)
def test_layers_with_windows_are_asked_beyond_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However wide these are; a mask that begins one entry off is named, in the first forward beyond the window."""
    model = make(f"{family}Config", WINDOWED[family])
    widths = [getattr(own, "sliding_window", None) for own in (model.config, *model.modules())]
    for implementation in "eager", "sdpa":
        model.set_attn_implementation(implementation)
        assert (why_not(model), probe(model)) == (None, None)
    for offset, said in (1, "left out the last 1 entries"), (-1, "left out the first 1 entries"):
        with monkeypatch.context() as patched:
            wrong = lambda first, offset=offset: first + offset * (first > 0)  # noqa: E731
            begins_elsewhere(patched, "DynamicSlidingWindowLayer", wrong)
            found = probe(model)
        assert found is not None
        assert (found.position, found.layer) == (WINDOW + 1, 1 if family in ("Qwen2", "Cwm") else 0)
        assert said in found.text
    assert [getattr(own, "sliding_window", None) for own in (model.config, *model.modules())] == widths


def test_static_caches_are_asked_too(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever generates may be given one: its masks are its own."""
    assert probe(models()) is None
    begins_elsewhere(monkeypatch, "StaticLayer", lambda first: first + 1)
    found = probe(models())
    assert found is not None
    assert found.layer == 0


def test_padding_in_front_of_a_row_is_asked_for(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch begin at different places; a mask lets in what fills the shorter ones up."""
    right = masking_utils.padding_mask_function
    monkeypatch.setattr(masking_utils, "padding_mask_function", lambda mask: right(torch.ones_like(mask)))
    found = probe(models())
    assert found is not None
    assert (found.layer, found.position) == (0, PADDING)
    assert found.text == f"attention at position {PADDING} read {PADDING} entries in front as well, padding among them"


def test_padding_is_asked_for_where_a_cache_is_longer_than_its_rows(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a static one is: its masks are filled up, here one entry off."""
    right, sizes = masking_utils.prepare_padding_mask, []

    def shifted(mask: torch.Tensor | None, length: int, offset: int) -> torch.Tensor | None:
        made = right(mask, length, offset)
        if mask is None or mask.shape[1] == length:
            return made
        sizes.append(length)
        return made.roll(-1, 1)

    monkeypatch.setattr(masking_utils, "prepare_padding_mask", shifted)
    found = probe(models())
    assert sizes
    assert found is not None
    assert found.text == f"attention at position {PADDING} read 1 entries in front as well, padding among them"


def test_a_cache_of_the_probe_is_nobodys(models) -> None:
    """What a caller's cache holds is not touched."""
    model, cache = models(), DynamicCache()
    with attach(model, CanaryConfig(content="full")), torch.no_grad():
        model(torch.tensor([[3, 1, 4]]), **{cache_argument(model): cache})
        assert cache.get_seq_length() == 3
