"""The engine on a model whose layers see a sliding window: its pool keeps what is seen, its output stays the same."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig
from spec_engine import ConfigError, Engine, EngineConfig, SamplingParams
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.pools.window_pool import WindowPool
from spec_engine.mock import MockTokenizer, with_random_weights
from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle
from spec_engine.models.standalone import Standalone

WINDOW = 10
RAW = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
}
HEAD = RAW | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (5, 17, 40)
]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def window_engine(monkeypatch: pytest.MonkeyPatch, **settings) -> Engine:
    """Two layers with a window of ten positions; the draft is a random EAGLE head, which sees everything."""
    target = with_random_weights(Decoder(parse_config(RAW)), seed=3)
    head = with_random_weights(Eagle(parse_config(HEAD), target), seed=4)
    defaults = {"dtype": "float64", "max_total_tokens": 1024, "max_running_requests": 3, "page_size": 4}
    defaults |= {"canary": CanaryConfig(mode="raise", content="full"), "topk": 1, "num_steps": 3}
    config = EngineConfig(**defaults | {"prefill_chunk_tokens": 16} | settings)
    return Engine(config, model=target, draft=None if config.draft == "none" else head, tokenizer=MockTokenizer())


class WindowKV:
    """Keeps everything, and lets each token see the last WINDOW ones."""

    def attend(self, layer, q, k, v):
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) / 8**0.5
        seen = torch.ones(len(q), len(q)).tril().triu(1 - WINDOW).bool()
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Every token from a forward over its whole row, in no pool."""
    target, outputs = with_random_weights(Decoder(parse_config(RAW)), seed=3), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(GREEDY.max_new_tokens):
            hidden = target(torch.tensor(tokens), torch.arange(len(tokens)), WindowKV()).hidden
            tokens.append(int(target.logits(hidden[-1]).argmax()))
        outputs.append(tuple(tokens[len(prompt) :]))
    return outputs


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "none"},
        {"draft": "none", "schedule": "overlap", "page_size": 1},
        {"schedule": "overlap"},
        {"topk": 3, "num_draft_tokens": 10, "page_size": 8},
        {"topk": 2, "schedule": "overlap", "attention_backend": "dense", "page_size": 1},
    ],
)
def test_a_window_pool_changes_no_token(monkeypatch, expected, settings):
    """Chains, trees and plain decoding say what forwards over whole rows say; the canary is silent."""
    engine = window_engine(monkeypatch, **settings)
    assert tokens_of(engine) == expected
    assert engine.canary.certificate()["findings"] == []
    assert engine.pools["target"].num_slots < engine.config.max_total_tokens
    assert tokens_of(engine) == expected  # prefixes come from the cache where their windows are still there
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_accepted_nodes_move_within_the_window_pool(monkeypatch, expected, schedule):
    """Both ends of a move go through the map; the draft has the target's weights but no window."""
    target, seeing_all = (
        with_random_weights(Decoder(parse_config(raw)), seed=3)
        for raw in (RAW, RAW | {"architectures": ["LlamaForCausalLM"]})
    )
    moved, inner = [], KVPool.move

    def move(pool, source, destination):
        moved.extend(source.tolist() if pool.name == "target" else ())
        inner(pool, source, destination)

    monkeypatch.setattr(KVPool, "move", move)
    settings = {"dtype": "float64", "max_total_tokens": 1024, "page_size": 4, "topk": 3, "num_draft_tokens": 10}
    config = EngineConfig(
        **settings,
        num_steps=3,
        schedule=schedule,
        canary=CanaryConfig(mode="raise", content="full"),
        draft="standalone",
    )
    engine = Engine(config, model=target, draft=Standalone(seeing_all, target), tokenizer=MockTokenizer())
    assert tokens_of(engine) == expected
    assert len(moved) >= 5
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("host_pages", [0, 64])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_pressed_pool_loses_no_token(monkeypatch, expected, prefix_cache, host_pages):
    """Retracted requests resume with the same tokens; what comes back from the host comes back through the map."""
    settings = {"max_total_tokens": 112, "host_pages": host_pages, "prefix_cache": prefix_cache}
    engine = window_engine(monkeypatch, **settings, new_token_ratio=0.0)
    assert tokens_of(engine) == expected
    assert engine.metrics.num_retractions
    assert bool(engine.metrics.restored_tokens) == bool(host_pages)
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("prefill_chunk_tokens", [8, 16])
def test_a_small_window_pool_lets_fewer_run(monkeypatch, expected, prefill_chunk_tokens):
    """Its pages count at admission, as many as a row ever holds, however long it gets."""
    engine = window_engine(monkeypatch, max_window_tokens=48, prefill_chunk_tokens=prefill_chunk_tokens)
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.running))
    assert most == 2
    assert engine.metrics.num_retractions == 0
    assert tokens_of(engine) == expected
    assert engine.canary.certificate()["findings"] == []


def test_a_cached_prefix_is_used_as_far_as_its_window_is_there(monkeypatch):
    """The last pages of a finished row have their window, the first ones have not."""
    engine = window_engine(monkeypatch)
    first = engine.generate([PROMPTS[2]], GREEDY)[0]
    engine.metrics.prefill_tokens = 0
    engine.generate([[*PROMPTS[2][:20], 1, 2, 3]], GREEDY)  # its window is gone
    assert engine.metrics.prefill_tokens == 23
    engine.metrics.prefill_tokens = 0
    engine.generate([PROMPTS[2] + list(first.token_ids)], GREEDY)
    assert engine.metrics.prefill_tokens < 8


def test_pages_that_are_still_seen_are_missed(monkeypatch, expected):
    """A window pool that slides too far fails the check before the forward."""
    inner = WindowPool.slide

    def slide(pool, row):
        end = min(row.committed_len + 8, len(row.pages) * pool.page_size)
        return inner(pool, row._replace(committed_len=end))

    monkeypatch.setattr(WindowPool, "slide", slide)
    with pytest.raises(Exception, match="has no window page, but readers see positions from"):
        tokens_of(window_engine(monkeypatch))


def test_the_report_names_the_row_whose_map_is_wrong(monkeypatch):
    """Clean while it runs; one entry sent elsewhere is one divergence, at its position."""
    engine = window_engine(monkeypatch, canary=CanaryConfig(mode="off"))
    engine.submit(PROMPTS[1], GREEDY)
    for _ in range(4):
        engine.step()
    assert [row.is_clean for row in engine.window_report()] == [True]
    [request] = engine.running
    position = request.committed_len - 2
    slot = int(engine.request_table.table[request.row, position])
    engine.windows.slot_map[slot] = 0
    [row] = engine.window_report()
    assert row.unmapped == (position,)


def test_what_cannot_read_windows_is_refused(monkeypatch):
    """A sentence for the backend, and for a report without a window."""
    with monkeypatch.context() as patch:
        patch.setitem(HEAD, "architectures", ["MistralForCausalLM"])
        with pytest.raises(ConfigError, match="a draft model must see everything, got one with a sliding window of 10"):
            window_engine(patch)
    with pytest.raises(ConfigError, match="'paged' reads no sliding windows, the model has one of 10 positions"):
        window_engine(monkeypatch, attention_backend="paged")
    with pytest.raises(ConfigError, match="window_report needs a model with a sliding window"):
        Engine(EngineConfig(draft="none")).window_report()


def test_a_window_pool_holds_a_row_and_a_chunk(monkeypatch):
    """A smaller one could never run a request alone; the sentence says what it takes."""
    with pytest.raises(ConfigError, match="max_window_tokens must be at least 40, got 36: a window of 10 positions"):
        window_engine(monkeypatch, max_window_tokens=36)
    window_engine(monkeypatch, max_window_tokens=40)


def test_window_pages_of_a_damaged_request_are_filled_as_it_ends(monkeypatch):
    """NaN that it has computed meets no next owner, whatever the budget; what others give back waits for that."""
    canary = CanaryConfig(mode="abort", content="full")
    engine = window_engine(monkeypatch, canary=canary, prefix_cache=False)
    [poisoner] = engine.canary.session.mapped.values()
    poisoner.budget = 0
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, GREEDY)
    while len(engine.running) < 2 or not engine.running[1].output_ids:
        engine.step()
    request = engine.running[1]
    last = engine.request_table.table[request.row, request.committed_len - 1 : request.committed_len]
    slot = int(engine.windows.translate(last))
    engine.pools["target"].kv[0, slot, 1, 0, 5] = float("nan")
    while engine.has_work:
        engine.step()
    assert {name for finding in engine.canary.findings for name in finding.readers} == {request.request_id}
    assert slot // 4 in poisoner.poisoned
    assert poisoner.waiting


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("draft", ["auto", "none"])
def test_damage_in_a_window_is_healed(monkeypatch, expected, draft, schedule):
    """Mode heal: the request computes its window again, and all say the same as ever."""
    canary = CanaryConfig(mode="heal", content="full")
    engine = window_engine(monkeypatch, canary=canary, schedule=schedule, draft=draft)
    inner, steps = engine.step, iter(range(1000))

    def step():
        if next(steps) == 8:
            last = engine.running[1].committed_len - 2
            full = int(engine.request_table.table[engine.running[1].row, last])
            engine.pools["target"].kv[:, int(engine.windows.slot_map[full])] += 1
        return inner()

    engine.step = step
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
    assert engine.canary.certificate()["healed"] == 1
