"""Prefills on a GPU with a canary: the host waits for nothing but declared copies."""

from __future__ import annotations

import pytest
import torch

from held_memory import expect_memory_to_stay
from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary_kernels.record.layout import CHAIN
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.attention.long_chunks import LEAST_LONG
from spec_engine.models.embedded import load_excerpts
from spec_engine.request import TokenEvent

pytestmark = pytest.mark.gpu
PROMPTS = [excerpt.prompt[:150] for excerpt in load_excerpts()[20:24]]
GREEDY = SamplingParams(max_new_tokens=4, ignore_eos=True)
SHAPES = [{}, {"page_size": 1}, {"kv_cache_dtype": "fp8_e4m3"}, {"graphs": "on"}]


def make(mode: str = "raise", **settings: object) -> Engine:
    common = {"draft": "none", "dtype": "float32", "device": "cuda", "schedule": "overlap", "page_size": 4}
    common |= {
        "attention_backend": "triton",
        "prefix_cache": False,
        "max_total_tokens": 4096,
        "context_length": 256,
        "prefill_chunk_tokens": 24,
    }
    return Engine(EngineConfig(canary=CanaryConfig(mode=mode), **common | settings))


def run(engine: Engine, events: list[TokenEvent]) -> None:
    """To the end, or to what stops the engine; ``events`` are those that left."""
    while engine.has_work:
        events += engine.step()


@pytest.mark.parametrize("mode", ["off", "raise"])
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_a_step_of_prefills_waits_for_nothing_but_copies(settings, mode):
    """Whole steps, admission and pages too, behind one that has compiled and allocated all; the tokens stay."""
    engine = make(mode, **settings)
    truths = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    names = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    events, num_strict = [], 0
    wanted = engine.metrics.prefill_tokens + sum(len(request.prompt_ids) for request in engine.scheduler.waiting)
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.metrics.prefill_tokens < wanted:
            events += engine.step()
            num_strict += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_work:
        events += engine.step()
    left = [tuple(token for event in events if event.request_id == name for token in event.token_ids) for name in names]
    assert left == truths
    assert num_strict > 3
    assert engine.canary is None or engine.canary.certificate()["findings"] == []


def expect_found_before_a_token(engine: Engine, position: int) -> None:
    """Damage to the record of this position of the first request stops the engine, and no token leaves."""
    slot = int(engine.request_table.table[engine.running[0].row, position])
    engine.canary.session.state.by_name["target"].records[slot, CHAIN] ^= 1 << 40
    events: list[TokenEvent] = []
    with pytest.raises(KVCorruptionError) as caught:
        run(engine, events)
    assert events == []
    assert [(finding.code, finding.slot) for finding in caught.value.findings] == [("R3", slot)]


def test_no_token_leaves_a_prefill_that_read_damage():
    """The flight of the step that reads it stops the engine, and so nothing that was launched behind it counts."""
    engine = make()
    engine.submit(PROMPTS[0], GREEDY)
    engine.step()
    expect_found_before_a_token(engine, 1)


def test_memory_does_not_grow():
    """What a forward needs comes back when it was heard."""
    engine = make(prefix_cache=True)
    expect_memory_to_stay(engine, lambda: engine.generate(PROMPTS, GREEDY), 60, 200)


LONG = [text for excerpt in load_excerpts() for text in (excerpt.prompt, "\n")]


def long_tokens(engine: Engine, length: int) -> list[int]:
    """A prompt of so many tokens, that cuDNN attends."""
    return engine.tokenizer.encode("".join(LONG * 8))[:length]


def make_long(mode: str, **settings: object) -> Engine:
    room = {"max_total_tokens": 8192, "context_length": 2400, "prefill_chunk_tokens": 2048, "page_size": 16}
    return make(mode, dtype="bfloat16", **room | settings)


@pytest.mark.parametrize("length", [LEAST_LONG, LEAST_LONG + 77])
@pytest.mark.parametrize("settings", [{}, {"draft": "auto", "topk": 1}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_a_long_prompt_says_the_same_every_time(settings, length):
    """With a canary and without, whether its length is new, was seen, or is prepared for; and nothing fires."""
    reported = []
    for mode in ("off", "raise"):
        engine = make_long(mode, **settings)
        prompt = long_tokens(engine, length)
        reported += [engine.generate([prompt], GREEDY)[0].token_ids for _ in range(4)]
    assert reported == reported[:1] * len(reported)
    assert engine.canary.certificate()["findings"] == []
    assert engine.canary.certificate()["slots_sealed"] >= 4 * length


def test_damage_behind_a_long_chunk_is_found():
    """The next chunk reads it, in buffers that were used before; no token leaves."""
    engine = make_long("raise", prefill_chunk_tokens=LEAST_LONG)
    prompt = long_tokens(engine, 2 * LEAST_LONG)
    for _ in range(3):
        engine.generate([prompt], GREEDY)
    engine.submit(prompt, GREEDY)
    engine.step()
    expect_found_before_a_token(engine, 700)
