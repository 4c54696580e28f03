"""The engine on KV pools of 8-bit numbers: drafting changes no token, nor does anything that moves rows about."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from spec_engine import ConfigError, Engine, EngineConfig, SamplingParams
from spec_engine.memory.pools.pool import KVPool
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Standalone
from spec_engine.models.embedded import load_excerpts

WHOLE = CanaryConfig(mode="raise", content="full")
PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 17, 30)
]
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)


def toy_engine(folder, **settings) -> Engine:
    """A random 8-layer model in float64, as sure of a token as random weights are; the canary looks at everything."""
    defaults = {"draft": "none", "page_size": 4, "max_total_tokens": 1024, "prefill_chunk_tokens": 16, "canary": WHOLE}
    settings = defaults | {"kv_cache_dtype": "fp8_e4m3", "dtype": "float64"} | settings
    if settings["draft"] == "standalone":
        settings["draft_model"] = str(folder)
    return Engine(EngineConfig(model=str(folder), **settings))


def tokens_of(engine: Engine, prompts=PROMPTS) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def expected(toy_model) -> list[tuple[int, ...]]:
    """Greedy output without drafting, in a pool that holds everything."""
    return tokens_of(toy_engine(toy_model))


def test_8_bit_numbers_are_what_is_read(toy_model, expected):
    """Random weights are unsure enough for 8-bit K and V to change tokens; a pool without scales would not be read."""
    assert tokens_of(toy_engine(toy_model, kv_cache_dtype="auto")) != expected


@pytest.mark.parametrize(
    ("page_size", "topk", "num_steps", "schedule", "draft", "backend"),
    [
        (1, 1, 3, "sync", "standalone", "torch"),
        (4, 1, 3, "overlap", "eagle", "block-table"),
        (1, 2, 3, "overlap", "eagle3", "paged"),
        (4, 2, 3, "sync", "standalone", "paged"),
        (4, 4, 2, "overlap", "standalone", "torch"),
        (16, 2, 5, "overlap", "eagle3", "torch"),
        (16, 4, 3, "sync", "standalone", "paged"),
        (4, 2, 2, "sync", "eagle", "dense"),
    ],
)
def test_drafting_changes_no_token(toy_model, expected, page_size, topk, num_steps, schedule, draft, backend):
    """Draft, verify and decode write equal rows as equal bytes, so that greedy output is that of plain decoding."""
    tree = {"page_size": page_size, "topk": topk, "num_steps": num_steps}
    engine = toy_engine(toy_model, schedule=schedule, draft=draft, attention_backend=backend, **tree)
    assert tokens_of(engine) == expected
    assert draft != "standalone" or engine.metrics.accepted_length > 1.5
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("draft", [{"draft": "none"}, {"draft": "eagle3", "topk": 2, "num_steps": 3}])
def test_scales_stay_with_what_is_cached(toy_model, expected, draft):
    """A prompt that comes again reads the prefix cache's pages, scales included."""
    engine = toy_engine(toy_model, **draft)
    assert tokens_of(engine) == expected
    first = engine.metrics.prefill_tokens
    assert tokens_of(engine) == expected
    assert engine.metrics.prefill_tokens < 1.5 * first
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("host_pages", [0, 64])
def test_scales_come_back_with_retracted_requests(toy_model, expected, host_pages, schedule):
    """Under pressure rows are computed again, or go to the host and come back: the same tokens, no finding."""
    pressed = {"max_total_tokens": 128, "new_token_ratio": 0.0, "host_pages": host_pages, "schedule": schedule}
    engine = toy_engine(toy_model, draft="eagle3", topk=2, num_steps=3, **pressed)
    assert tokens_of(engine) == expected
    assert engine.metrics.num_retractions
    assert bool(engine.metrics.restored_tokens) == bool(host_pages)
    assert engine.canary.certificate()["findings"] == []


def test_a_scale_that_flips_in_host_memory_is_told_when_it_comes_back(toy_model):
    """T1 at the load: scales are part of what was offloaded."""
    pressed = {"max_total_tokens": 128, "new_token_ratio": 0.0, "host_pages": 64}
    engine = toy_engine(toy_model, draft="eagle3", topk=2, num_steps=3, **pressed)
    tier = engine.memory.tier
    inner = tier.wait

    def wait(block):
        inner(block)
        tier._rows[0].parts[1].view(torch.int32)[block.places[0] * 4 + 1, 3, 1] ^= 1 << 18

    tier.wait = wait
    with pytest.raises(KVCorruptionError) as caught:
        tokens_of(engine)
    finding = caught.value.findings[0]
    assert (finding.code, finding.layers, finding.part, finding.bit) == ("T1", (3,), "v_scale", 18)
    assert finding.causes[0].text.startswith(
        "one word: one bit, bit 18, of v_scale, head 0, dim 0, on page 0 of snapshot 1"
    )


@pytest.mark.parametrize("kinds", [["sliding_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_window_pools_have_scales_too(kinds):
    """Pages behind a map: drafting changes no token, and the canary has no finding, with host memory and without."""
    window = {"architectures": ["MistralForCausalLM"], "sliding_window": 10, "layer_types": kinds}
    target = random_model(3, **window)
    outputs = []
    for draft in (None, Standalone(random_model(3), target)):
        settings = {"draft": "none" if draft is None else "standalone", "topk": 1, "num_steps": 3, "page_size": 4}
        config = EngineConfig(
            dtype="float64", kv_cache_dtype="fp8_e4m3", max_total_tokens=512, canary=WHOLE, **settings
        )
        engine = Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())
        outputs.append(tokens_of(engine))
        assert engine.canary.certificate()["findings"] == []
    assert outputs[0] == outputs[1]


def test_sizes_count_the_scales(toy_model):
    """A slot has a byte a number of K and V and four a scale, in each layer of each pool."""
    engine = toy_engine(toy_model, draft="eagle3")
    slots = 1024 + 4
    assert engine.sizes.pool_bytes == {"target": 8 * slots * (2 * 2 * 8 + 8), "draft": slots * (2 * 2 * 8 + 8)}


def test_the_embedded_model_says_nearly_the_same():
    """Of the tokens behind an equal beginning at least 95 of 100 are those that the model's own numbers choose."""
    prompts = [excerpt.prompt for excerpt in load_excerpts()[:24]]
    own, short = (
        [
            output.token_ids
            for output in Engine(
                EngineConfig(kv_cache_dtype=kind, max_total_tokens=4096, max_running_requests=12)
            ).generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True))
        ]
        for kind in ("auto", "fp8_e4m3")
    )
    equal = [next((place for place in range(16) if a[place] != b[place]), 16) for a, b in zip(own, short, strict=True)]
    compared = sum(min(count + 1, 16) for count in equal)  # behind the first difference texts are different ones
    assert sum(equal) >= 0.95 * compared


def test_other_types_are_refused():
    """The sentence names what there is."""
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8_e4m3, got 'fp8'"):
        EngineConfig(kv_cache_dtype="fp8")


def test_a_pool_of_the_models_numbers_has_no_scales(toy_model):
    """Without the setting nothing is quantised and nothing is paid."""
    engine = toy_engine(toy_model, kv_cache_dtype="auto", canary=CanaryConfig(mode="off"))
    [pool] = engine.pools.values()
    assert type(pool) is KVPool
    assert pool.kv.dtype is pool.dtype is torch.float64
    assert pool.parts == (pool.kv,)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "paged", "triton", "triton-paged"])
@pytest.mark.parametrize("draft", ["eagle3", "standalone"])
def test_drafting_changes_no_token_on_cuda(toy_model, draft, backend):
    """8-bit pools on a GPU, in float32: the tokens of plain decoding, no finding, whichever backend reads."""
    settings = {"device": "cuda", "dtype": "float32", "attention_backend": backend}
    expected = tokens_of(toy_engine(toy_model, **settings | {"attention_backend": "torch"}))
    engine = toy_engine(toy_model, draft=draft, topk=2, num_steps=3, **settings)
    assert tokens_of(engine) == expected
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.gpu
def test_scales_come_back_with_retracted_requests_on_cuda(toy_model):
    """Pinned host memory, side streams."""
    settings = {"device": "cuda", "dtype": "float32", "draft": "eagle3", "topk": 2, "num_steps": 3}
    expected = tokens_of(toy_engine(toy_model, **settings))
    engine = toy_engine(toy_model, max_total_tokens=128, new_token_ratio=0.0, host_pages=64, **settings)
    assert tokens_of(engine) == expected
    assert engine.metrics.restored_tokens
    assert engine.canary.certificate()["findings"] == []
