"""The engine on a toy hybrid model: drafting commits the state of the accepted node, and output stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structlog

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary_kernels.engine.delta_shape import DeltaShape
from spec_engine import ConfigError, Engine, EngineConfig, SamplingParams
from spec_engine.memory.recurrent import RecurrentPool
from spec_engine.mock import MockTokenizer, with_random_weights
from spec_engine.models.config import ModelConfig
from spec_engine.models.eagle import Eagle
from spec_engine.models.hybrid import HybridDecoder

HEAD = ModelConfig("LlamaForCausalLM", 16, 24, 1, 2, 1, 8, 50, 128, target_hidden_size=16)
CONFIG = replace(HEAD, num_layers=4, delta=DeltaShape(1, 2, 3, 4, 3), delta_layers=(0, 2))
PROMPTS = [[3, 14, 15, 9, 26], [5, 35, 8], list(range(40, 19, -1))]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


def hybrid_engine(monkeypatch: pytest.MonkeyPatch, drafts: bool = True, **settings) -> Engine:
    """Two of four layers are recurrent; the draft is a random EAGLE head."""
    target = with_random_weights(HybridDecoder(CONFIG), seed=6)
    head = with_random_weights(Eagle(HEAD, target), seed=6)
    defaults = {"dtype": "float64", "max_total_tokens": 1024, "prefill_chunk_tokens": 8, "page_size": 4}
    defaults |= {"canary": CanaryConfig(mode="raise", content="full"), "draft": "auto" if drafts else "none"}
    config = EngineConfig(**defaults | settings)
    return Engine(config, model=target, draft=None if config.draft == "none" else head, tokenizer=MockTokenizer())


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Greedy output without drafting."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return tokens_of(hybrid_engine(monkeypatch, drafts=False))


@pytest.mark.parametrize(
    ("topk", "num_steps", "max_total_tokens"), [(1, 3, 1024), (3, 3, 1024), (1, 3, 64), (2, 2, 112), (3, 3, 112)]
)
def test_drafting_does_not_change_what_a_hybrid_model_says(monkeypatch, expected, topk, num_steps, max_total_tokens):
    """Chains and trees, prompts in chunks, and a pool in which requests are retracted; the canary is silent."""
    engine = hybrid_engine(
        monkeypatch, topk=topk, num_steps=num_steps, max_total_tokens=max_total_tokens, new_token_ratio=0.0
    )
    assert tokens_of(engine) == expected
    assert (engine.metrics.num_retractions > 0) == (max_total_tokens < 1024)
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_take_turns_with_their_states(monkeypatch, expected, drafts):
    """States stay by row, while the pages of those that wait lie on the host."""
    room = {"max_device_tokens": 48, "device_turn": 2, "topk": 1, "num_steps": 2}
    engine = hybrid_engine(monkeypatch, drafts, **room)
    assert tokens_of(engine) == expected
    assert engine.split.num_swapped_in > 0
    assert engine.canary.certificate()["findings"] == []


def test_the_state_of_another_node_is_found(monkeypatch, expected):
    """Committing the root's state instead of the accepted node's changes the output, and is found where it is taken."""
    inner, room = RecurrentPool.commit, {"topk": 3, "num_steps": 3, "num_draft_tokens": 16}
    monkeypatch.setattr(RecurrentPool, "commit", lambda pool, rows, nodes: inner(pool, rows, [0] * len(nodes)))
    assert tokens_of(hybrid_engine(monkeypatch, canary=CanaryConfig(mode="off"), **room)) != expected
    with pytest.raises(KVCorruptionError, match="the state of another accepted count is taken") as caught:
        tokens_of(hybrid_engine(monkeypatch, **room))
    assert caught.value.findings[0].code == "R4"


def test_padding_that_overwrites_a_parked_state_is_found(monkeypatch, expected):
    """tokenspeed#700: what padding computes goes to row 1, be its request in the batch or not, and nobody is told."""
    inner = RecurrentPool.commit

    def commit(pool: RecurrentPool, rows: list[int], nodes: list[int]) -> None:
        inner(pool, rows, nodes)
        if 1 not in rows and pool.states[:, 1].any():
            pool.nodes[:, 0, 0] = 0.5
            pool.states[:, 1] = pool.nodes[:, 0, 0]

    monkeypatch.setattr(RecurrentPool, "commit", commit)
    room = {"max_device_tokens": 48, "device_turn": 2, "topk": 1, "num_steps": 2}
    with pytest.raises(KVCorruptionError) as caught:
        tokens_of(hybrid_engine(monkeypatch, **room))
    finding = caught.value.findings[0]
    assert (finding.code, finding.causes[0].family) == ("R9", "graphs")


def test_states_are_judged(monkeypatch, expected):
    """Every forward of every request takes one, and under `full` its bytes are compared."""
    engine = hybrid_engine(monkeypatch, topk=3, num_steps=3)
    assert tokens_of(engine) == expected
    certificate = engine.canary.certificate()
    assert certificate["states_checked"] >= certificate["forwards"] // 5
    assert certificate["unchecked"] == {}


def test_a_row_begins_at_zero(monkeypatch, expected):
    """One row serves all requests in turn."""
    assert tokens_of(hybrid_engine(monkeypatch, max_running_requests=1)) == expected


def test_a_hybrid_model_has_no_prefix_cache(monkeypatch):
    """One sentence says so: a prefix has no state of its own."""
    with structlog.testing.capture_logs() as events:
        engine = hybrid_engine(monkeypatch)
    [event] = [event for event in events if event["event"] == "spec_engine.prefix_cache"]
    assert event["sentence"].startswith("the model has recurrent layers: it runs without a prefix cache")
    assert not engine.memory.caches_prefixes


def test_pages_on_the_host_are_refused(monkeypatch):
    """A sentence that names the setting and why."""
    with pytest.raises(ConfigError, match="host_pages must be 0 for a model with recurrent layers, got 8"):
        hybrid_engine(monkeypatch, host_pages=8)


@pytest.mark.parametrize("drafts", [False, True])
def test_the_host_may_be_behind(monkeypatch, expected, drafts):
    """The overlap schedule says the same, and judges as many states."""
    engine = hybrid_engine(monkeypatch, drafts, schedule="overlap", topk=3, num_steps=3)
    assert tokens_of(engine) == expected
    certificate = engine.canary.certificate()
    assert certificate["findings"] == []
    assert certificate["states_checked"] >= certificate["forwards"] // 5


@pytest.mark.parametrize("drafts", [False, True])
def test_a_damaged_state_is_computed_again(monkeypatch, expected, drafts):
    """Mode heal: its request begins anew, and all say the same as ever."""
    canary = CanaryConfig(mode="heal", content="full")
    engine = hybrid_engine(monkeypatch, drafts, canary=canary, topk=1, num_steps=3)
    inner, steps = engine.step, iter(range(1000))

    def step():
        if next(steps) == 6:
            engine.states.states[:, engine.running[1].row] += 1
        return inner()

    engine.step = step
    assert tokens_of(engine) == expected
    assert {finding.entry is not None for finding in engine.canary.findings} == {True}
    assert engine.canary.certificate()["healed"] == 1
