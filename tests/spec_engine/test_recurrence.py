"""The engine on a toy hybrid model: drafting commits the state of the accepted node, and output stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structlog

from kvcanary import CanaryConfig
from spec_engine import ConfigError, Engine, EngineConfig, SamplingParams
from spec_engine.memory.pools.recurrent import RecurrentPool
from spec_engine.mock import MockTokenizer, with_random_weights
from spec_engine.models.config import ModelConfig
from spec_engine.models.eagle import Eagle
from spec_engine.models.hybrid import HybridDecoder

CONFIG = ModelConfig("LlamaForCausalLM", 16, 24, 4, 2, 1, 8, 50, 128, target_hidden_size=16)
PROMPTS = [[3, 14, 15, 9, 26], [5, 35, 8], list(range(40, 19, -1))]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


def hybrid_engine(monkeypatch: pytest.MonkeyPatch, drafts: bool = True, **settings) -> Engine:
    """Two of four layers are recurrent; the draft is a random EAGLE head."""
    target = with_random_weights(HybridDecoder(CONFIG, (0, 2), 12), seed=5)
    head = with_random_weights(Eagle(replace(CONFIG, num_layers=1), target), seed=6)
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


def test_the_state_of_another_node_changes_the_output(monkeypatch, expected):
    """Committing the root's state instead of the accepted node's is enough."""
    inner = RecurrentPool.commit
    monkeypatch.setattr(RecurrentPool, "commit", lambda pool, rows, nodes: inner(pool, rows, [0] * len(nodes)))
    assert tokens_of(hybrid_engine(monkeypatch, topk=3, num_steps=3, num_draft_tokens=16)) != expected


def test_a_row_begins_at_zero(monkeypatch, expected):
    """One row serves all requests in turn."""
    assert tokens_of(hybrid_engine(monkeypatch, max_running_requests=1)) == expected


def test_a_hybrid_model_is_routed_to_the_synchronous_schedule(monkeypatch):
    """One sentence says so; the prefix cache is off, since a prefix has no state of its own."""
    with structlog.testing.capture_logs() as events:
        engine = hybrid_engine(monkeypatch)
    assert next(event for event in events if event["event"] == "spec_engine.schedule")["sentence"].startswith(
        "the model has recurrent layers: it runs on the synchronous schedule without a prefix cache"
    )
    assert not engine.memory.caches_prefixes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "overlap"}, "schedule must be sync for a model with recurrent layers, got 'overlap'"),
        ({"host_pages": 8}, "host_pages must be 0 for a model with recurrent layers, got 8"),
    ],
)
def test_what_recurrent_layers_rule_out_is_refused(monkeypatch, settings, words):
    """A sentence that names the setting and why."""
    with pytest.raises(ConfigError, match=words):
        hybrid_engine(monkeypatch, **settings)
