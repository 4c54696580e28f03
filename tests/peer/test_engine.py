"""What another canary is asked of a whole server, asked of our engine: its prefix tree, its chunks, its relay."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.faults.target import Call, Setup
from kvcanary_tools.campaign.harness import EngineTarget
from spec_engine import Engine, EngineConfig, SamplingParams

PROMPT_LEN, NEW_TOKENS = 36, 24


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    def make(**settings: object) -> Engine:
        canary = CanaryConfig(mode="raise", content="full", seed=3)
        shape = {"page_size": 4, "topk": 1, "num_steps": 2, "max_total_tokens": 1024, "prefill_chunk_tokens": 16}
        return Engine(EngineConfig(canary=canary, **shape | settings))

    return make


def submit(engine: Engine, first: int, length: int = PROMPT_LEN) -> str:
    prompt = [(first + 7 * place) % 500 + 1 for place in range(length)]
    return engine.submit(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def feed_another(target: EngineTarget, entry: int, when: Callable[[Call], bool]) -> None:
    """One token that a target prefill is fed is another one than the request has there."""

    def hook(call: Call) -> bool:
        if call.pool != "target" or not when(call):
            return False
        tokens = call.write.tokens.clone()
        tokens[entry] ^= 1
        call.write = replace(call.write, tokens=tokens)
        target.record(position=int(call.write.positions[entry]))
        return True

    target.before("prefill", hook)


def test_the_sweep_lists_exactly_what_the_prefix_tree_holds(make_engine) -> None:
    """With nobody running; while somebody runs, what the rows do not hold; and nothing when the tree is empty."""
    engine = make_engine()
    scrubber = engine.canary.session.checks.cached
    assert scrubber._pages().tolist() == []
    submit(engine, 1)
    submit(engine, 200)
    run(engine)
    tree = engine.memory.cache.tree
    assert len(tree.pages) >= 2 * (PROMPT_LEN // 4)
    assert scrubber._pages().tolist() == sorted(tree.pages)
    submit(engine, 1)
    engine.step()
    [request] = engine.running
    assert scrubber._pages().tolist() == sorted(set(tree.pages) - set(request.pages))
    assert set(request.pages) & set(tree.pages)


@pytest.mark.parametrize("entry", [0, -1], ids=["first", "last"])
def test_a_wrong_token_at_a_chunk_s_border_is_found(make_engine, entry) -> None:
    """W6 at its position, in the step of the chunk."""
    engine = make_engine()
    target = EngineTarget(engine, Setup(), random.Random(1))
    feed_another(target, entry, lambda call: int(call.read.prefix_lens[0]) == 16)
    name = submit(engine, 1)
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    finding = caught.value.findings[0]
    assert (finding.code, finding.writer, finding.position) == ("W6", name, target.strike.place["position"])
    assert (finding.position, finding.step) == ((16, 31)[entry], 2)


def test_a_wrong_token_where_a_retracted_request_resumes_is_found(make_engine) -> None:
    """What was sampled before is part of what the host knows: W6 there too."""
    engine = make_engine(max_total_tokens=96, new_token_ratio=0.0, prefix_cache=False, prefill_chunk_tokens=64)
    target = EngineTarget(engine, Setup(), random.Random(1))
    feed_another(target, -1, lambda call: len(call.read.requests) == 1 and len(call.write.tokens) > PROMPT_LEN)
    for first in (1, 200):
        submit(engine, first)
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    assert engine.metrics.num_retractions > 0
    finding = caught.value.findings[0]
    assert (finding.code, finding.position) == ("W6", target.strike.place["position"])
    assert finding.position >= PROMPT_LEN


def test_tokens_exchanged_between_two_requests_after_sampling_are_found(make_engine) -> None:
    """Each is fed the other's newest token: W6 for both, before a token of that step leaves."""
    engine = make_engine()
    names = [submit(engine, first, 12) for first in (1, 200)]
    while not all(request.output_ids for request in engine.running) or not engine.running:
        engine.step()
    rows = [request.row for request in engine.running]
    assert engine.relay.bonus[rows[0]] != engine.relay.bonus[rows[1]]
    engine.relay.bonus[rows] = engine.relay.bonus[rows[::-1]]
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert {finding.code for finding in caught.value.findings} == {"W6"}
    assert {finding.writer for finding in caught.value.findings} == set(names)
