"""Retracted requests on the host: what they had computed comes back instead of being prefilled again."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.cache.host_rows import HostRows

PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 17, 30)
]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
TREE = {"draft": "eagle3", "page_size": 4, "topk": 2, "num_steps": 3}
PRESSED = {"max_total_tokens": 112, "new_token_ratio": 0.0}
WHOLE = {"mode": "raise", "content": "full"}
ROLLING = {"mode": "raise"}


def make_engine(folder, canary: dict | None = None, **settings) -> Engine:
    """An engine with a canary, whose pool is too small for all that it admits."""
    config = CanaryConfig(**(ROLLING if canary is None else canary))
    settings = TREE | PRESSED | settings
    if settings["draft"] == "standalone":
        settings["draft_model"] = str(folder)
    return Engine(EngineConfig(model=str(folder), dtype="float64", canary=config, **settings))


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected(toy_model) -> list[tuple[int, ...]]:
    """Greedy output of a pool in which nobody is retracted."""
    settings = TREE | {"max_total_tokens": 4096}
    return tokens_of(Engine(EngineConfig(model=str(toy_model), dtype="float64", **settings)))


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "sync", "prefix_cache": True},
        {"schedule": "overlap", "prefix_cache": False, "max_total_tokens": 144},
        {"schedule": "overlap", "page_size": 8, "topk": 1, "draft": "eagle", "max_total_tokens": 112},
        {"schedule": "sync", "draft": "none", "max_total_tokens": 64},
        {"schedule": "overlap", "draft": "standalone", "topk": 1, "max_total_tokens": 96},
        {"schedule": "overlap", "draft": "none", "max_total_tokens": 64, "prefix_cache": False},
    ],
)
def test_what_comes_back_from_the_host_is_not_computed_again(toy_model, expected, settings):
    """Outputs equal those of an unpressed pool, the canary is silent, and fewer tokens are prefilled than without."""
    plain = make_engine(toy_model, {"mode": "off", "quarantine": 0}, **settings)
    hosted = make_engine(toy_model, WHOLE, **settings, host_pages=64)
    assert tokens_of(plain) == tokens_of(hosted) == expected
    assert hosted.metrics.num_retractions
    assert hosted.metrics.restored_tokens
    assert hosted.metrics.prefill_tokens < plain.metrics.prefill_tokens
    assert hosted.memory.tier.num_free == 64
    assert hosted.canary.certificate()["findings"] == []


def test_a_prompt_half_prefilled_goes_on_where_it_was(toy_model, expected):
    """Retracted between two chunks it comes back with the first ones, whatever of it the prefix cache has by then."""
    engine = make_engine(toy_model, host_pages=64, prefill_chunk_tokens=8)
    assert tokens_of(engine) == expected
    assert engine.metrics.restored_tokens


@pytest.mark.parametrize("host_pages", [1, 8])
def test_a_small_tier_gives_up_what_it_cannot_hold(toy_model, expected, host_pages):
    """A block that never fits, or was evicted for another, is computed again."""
    engine = make_engine(toy_model, host_pages=host_pages)
    assert tokens_of(engine) == expected
    assert engine.memory.tier.num_free == host_pages


def test_a_load_that_fails_is_computed_again(toy_model, expected, monkeypatch):
    """The request waits again without its block; the first load fails here."""
    inner, calls = HostRows.load, []

    def load(rows, places, slots):
        calls.append(rows)
        if len(calls) == 1:
            raise OSError("host memory is gone")
        inner(rows, places, slots)

    monkeypatch.setattr(HostRows, "load", load)
    engine = make_engine(toy_model, host_pages=64)
    assert tokens_of(engine) == expected
    assert calls
    assert engine.memory.tier.num_free == 64
    assert engine.canary.certificate()["findings"] == []


def flip_first_block(engine: Engine) -> None:
    """A bit of the first block flips while it waits on the host."""
    tier = engine.memory.tier
    inner = tier.wait

    def wait(block):
        inner(block)
        if block.number == 1:
            place = block.places[0] * engine.config.page_size
            tier._rows[0].parts[0][place].view(torch.int64)[0, 0, 0, 0] ^= 1 << 20

    tier.wait = wait


def test_a_bit_that_flips_on_the_host_ends_that_request_only(toy_model, expected):
    """Mode abort: T1 at the load, its request ends as corrupted, all others with their tokens."""
    engine = make_engine(toy_model, {"mode": "abort"}, host_pages=64)
    flip_first_block(engine)
    outputs = engine.generate(PROMPTS, GREEDY)
    wrong = [place for place, output in enumerate(outputs) if output.finish_reason == "kv_corruption"]
    assert len(wrong) == 1
    findings = engine.canary.findings
    assert {finding.code for finding in findings} == {"T1", "R9"}
    assert {finding.reader for finding in findings} == {outputs[place].request_id for place in wrong}
    assert [o.token_ids for p, o in enumerate(outputs) if p not in wrong] == [
        t for p, t in enumerate(expected) if p not in wrong
    ]


def test_a_forward_that_does_not_wait_for_the_load_is_told(toy_model):
    """O1 where the forward over the pages is not ordered behind their copy."""
    engine = make_engine(toy_model, {"mode": "log"}, host_pages=64)
    engine.streams.main.wait = lambda event: None
    engine.generate(PROMPTS, GREEDY)
    assert "O1" in {finding.code for finding in engine.canary.findings}


@pytest.mark.parametrize("when", ["waiting", "restored"])
def test_a_cancelled_request_leaves_nothing_on_the_host(toy_model, when):
    """While it waits with its block, and after it came back."""
    engine = make_engine(toy_model, host_pages=64)
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    while engine.has_work:
        engine.step()
        holder = next((request for request in engine.scheduler.waiting if request.block is not None), None)
        if holder is not None and when == "waiting":
            engine.cancel(holder.request_id)
        if engine.metrics.restored_tokens and engine.running:
            engine.cancel(engine.running[-1].request_id)
    assert engine.memory.tier.num_free == 64
