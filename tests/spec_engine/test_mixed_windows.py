"""The engine on a model of which some layers see a window and others everything: two pools, the same output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.replay.replayer import replay
from kvcanary_kernels.engine.delta_shape import DeltaShape
from kvcanary_kernels.record.layout import CHAIN
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.pools.pool import KVPool
from spec_engine.mock import MockTokenizer, with_random_weights
from spec_engine.models.config import CheckpointError, parse_config
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3
from spec_engine.models.hybrid import HybridDecoder
from spec_engine.models.standalone import Standalone

WINDOW = 10
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
RAW = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "layer_types": KINDS,
}
HEAD = RAW | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
TAPS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}
PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (5, 17, 40)
]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def mixed_target() -> Decoder:
    return with_random_weights(Decoder(parse_config(RAW)), seed=3)


def mixed_engine(draft: str = "eagle", **settings) -> Engine:
    """One full layer among three with a window of ten positions; the draft is a random head, which sees everything."""
    target = mixed_target()
    heads = {
        "none": lambda: None,
        "eagle": lambda: with_random_weights(Eagle(parse_config(HEAD), target), seed=4),
        "eagle3": lambda: with_random_weights(Eagle3(parse_config(HEAD | TAPS), target), seed=4),
        "standalone": lambda: Standalone(
            with_random_weights(Decoder(parse_config(RAW | {"architectures": ["LlamaForCausalLM"]})), seed=3), target
        ),
    }
    defaults = {"dtype": "float64", "max_total_tokens": 1024, "max_running_requests": 3, "page_size": 4}
    defaults |= {"canary": CanaryConfig(mode="raise", content="full"), "topk": 1, "num_steps": 3}
    config = EngineConfig(**defaults | {"prefill_chunk_tokens": 16, "draft": draft} | settings)
    return Engine(config, model=target, draft=heads[draft](), tokenizer=MockTokenizer())


class MixedKV:
    """Keeps everything; a layer with a window lets each token see the last WINDOW ones."""

    def attend(self, layer, q, k, v):
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) / 8**0.5
        seen = torch.ones(len(q), len(q)).tril().bool()
        if KINDS[layer] == "sliding_attention":
            seen = seen.triu(1 - WINDOW)
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def continued(prompt: list[int], count: int) -> tuple[int, ...]:
    """The next tokens by forwards over all of them."""
    target, tokens = mixed_target(), list(prompt)
    for _ in range(count):
        hidden = target(torch.tensor(tokens), torch.arange(len(tokens)), MixedKV()).hidden
        tokens.append(int(target.logits(hidden[-1]).argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Every token from a forward over its whole row, in no pool."""
    return [continued(prompt, GREEDY.max_new_tokens) for prompt in PROMPTS]


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def running_engine(**settings) -> Engine:
    """The longest prompt, some steps into its decoding."""
    engine = mixed_engine(**settings)
    engine.submit(PROMPTS[2], GREEDY)
    while not engine.running or engine.running[0].output_len < 8:
        engine.step()
    return engine


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def slot_at(engine: Engine, behind: int) -> int:
    """The full slot of the position that lies so far behind the committed length of the only request."""
    [request] = engine.running
    return int(engine.request_table.table[request.row, request.committed_len - behind])


@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "none"},
        {"draft": "none", "schedule": "overlap", "page_size": 1},
        {"schedule": "overlap"},
        {"draft": "eagle3", "topk": 3, "num_draft_tokens": 10, "page_size": 8},
        {"topk": 2, "schedule": "overlap", "attention_backend": "dense", "page_size": 1},
    ],
)
def test_two_pools_change_no_token(expected, settings):
    """Chains, trees and plain decoding say what forwards over whole rows say; the canary is silent, also on a cache."""
    engine = mixed_engine(**settings)
    assert tokens_of(engine) == expected
    assert [(name, len(engine.pools[name].kv)) for name in ("target", "window")] == [("target", 1), ("window", 3)]
    assert engine.pools["window"].num_slots < engine.config.max_total_tokens < engine.pools["target"].num_slots
    known = [prompt + list(new) for prompt, new in zip(PROMPTS, expected, strict=True)]
    engine.metrics.prefill_tokens = 0
    again = engine.generate(known, SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert [output.token_ids for output in again] == [continued(tokens, 2) for tokens in known]
    assert engine.metrics.prefill_tokens < sum(map(len, known))
    assert engine.canary.certificate()["findings"] == []


def test_accepted_nodes_move_within_both_pools(monkeypatch, expected):
    """The draft has the target's weights but no window: trees are accepted in parts, and their nodes move."""
    moved, inner = [], KVPool.move

    def move(pool, source, destination):
        moved.append((pool.name, source.tolist()))
        inner(pool, source, destination)

    monkeypatch.setattr(KVPool, "move", move)
    engine = mixed_engine(draft="standalone", topk=3, num_draft_tokens=10)
    assert tokens_of(engine) == expected
    by_pool = {pool: sum(len(slots) for name, slots in moved if name == pool) for pool in ("target", "window")}
    assert by_pool["target"] == by_pool["window"] >= 5
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("host_pages", [0, 64])
def test_a_pressed_pool_loses_no_token(expected, host_pages):
    """Retracted requests resume with the same tokens; both pools come back from the host, one of them by its map."""
    engine = mixed_engine(max_total_tokens=112, host_pages=host_pages, new_token_ratio=0.0)
    assert tokens_of(engine) == expected
    assert engine.metrics.num_retractions
    assert bool(engine.metrics.restored_tokens) == bool(host_pages)
    assert engine.canary.certificate()["findings"] == []


def test_without_a_canary_the_same_comes_out(expected):
    """Both groups open without hooks."""
    assert tokens_of(mixed_engine(canary=CanaryConfig(mode="off"))) == expected


@pytest.mark.parametrize(("pool", "layer"), [("target", 0), ("window", 2)])
def test_a_flipped_bit_is_found_in_the_pool_where_it_lies(pool, layer):
    """The finding names the pool, its own slot and its own layer."""
    engine = running_engine()
    full = slot_at(engine, 4)
    own = int(engine.windows.slot_map[full]) if pool == "window" else full
    engine.pools[pool].kv.view(torch.int32)[layer, own, 1, 0, 3] ^= 1 << 5
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    [finding] = caught.value.findings
    assert (finding.code, finding.pool, finding.slot, finding.layers) == ("R9", pool, own, (layer,))


def test_a_byte_that_no_window_shows_is_found_when_its_page_leaves():
    """Nothing reads it any more: the last re-read before the page serves others does."""
    engine = running_engine(draft="none")
    [request] = engine.running
    while (request.committed_len + 1 - WINDOW) % 4 != 2:
        engine.step()
    behind = WINDOW + 1  # two positions are out of sight on the first page that the pool still keeps
    own = int(engine.windows.slot_map[slot_at(engine, behind - 1)])
    position = request.committed_len - behind + 1
    engine.pools["window"].kv.view(torch.int32)[1, own, 0, 1, 2] ^= 1
    with pytest.raises(KVCorruptionError) as caught:
        finish(engine)
    [finding] = caught.value.findings
    assert (finding.code, finding.pool, finding.slot, finding.position) == ("R9", "window", own, position)
    assert finding.site[0] == "release"


def test_a_free_window_page_is_poisoned_and_looked_at_when_it_is_granted():
    """What a request's slid window gave back is filled; a word written there since is P1."""
    engine = running_engine(draft="none", max_window_tokens=48, max_running_requests=1)
    rows, [page, *_] = engine.pools["window"].kv.view(torch.int32), engine.canary.session.mapped["window"].poisoned
    rows[2, page * 4 + 1, 0, 0, 0] ^= 8
    with pytest.raises(KVCorruptionError) as caught:
        finish(engine)
    [finding] = caught.value.findings
    assert (finding.code, finding.pool, finding.slot) == ("P1", "window", page * 4 + 1)


@pytest.mark.parametrize("settings", [{"draft": "none"}, {}, {"topk": 2, "schedule": "overlap", "page_size": 1}])
@pytest.mark.parametrize(("pool", "layer"), [("target", 0), ("window", 2)])
def test_a_dump_of_both_pools_is_replayed(tmp_path, settings, pool, layer):
    """The recording is clean up to the fault, also where it begins in mid-run, and reaches the finding after it."""
    canary = CanaryConfig(mode="raise", content="full", ring=4)
    engine = running_engine(**settings, canary=canary, max_window_tokens=96)
    before = replay(read_dump(engine.canary.dump(tmp_path / "before.kvdump")))
    assert (before.findings, before.errors) == ([], [])
    full = slot_at(engine, 4)
    own = int(engine.windows.slot_map[full]) if pool == "window" else full
    engine.pools[pool].kv.view(torch.int32)[layer, own, 1, 0, 3] ^= 1 << 5
    with pytest.raises(KVCorruptionError):
        finish(engine)
    dump = read_dump(engine.canary.dump(tmp_path / "found.kvdump"))
    assert dump.manifest["first_step"] > 0
    assert dump.findings[0]["pool"] == pool
    assert replay(dump).missing == []


def test_a_dump_of_a_damaged_window_page_is_replayed(tmp_path):
    """Pages that a group frees, fills and grants again are in the recording, from its first step on."""
    canary = CanaryConfig(mode="raise", content="full", ring=64)
    engine = running_engine(draft="none", canary=canary, max_window_tokens=48, max_running_requests=1)
    rows, [page, *_] = engine.pools["window"].kv.view(torch.int32), engine.canary.session.mapped["window"].poisoned
    rows[2, page * 4 + 1, 0, 0, 0] ^= 8
    with pytest.raises(KVCorruptionError):
        finish(engine)
    dump = read_dump(engine.canary.dump(tmp_path / "found.kvdump"))
    assert [finding["code"] for finding in dump.findings] == ["P1"]
    assert {"on_map", "on_unmap"} <= {event["call"] for event in dump.events}
    assert replay(dump).missing == []


@pytest.mark.parametrize(("entry", "codes"), [(0, {"R2"}), ("neighbour", {"R4", "R5", "R8", "R12"})])
def test_a_wrong_entry_of_the_map_is_found_in_the_window_pool_alone(entry, codes):
    """Full layers read the right slot, layers with a window another one; nothing is said of the full pool."""
    engine = running_engine()
    slots = engine.windows.slot_map
    slots[slot_at(engine, 4)] = int(slots[slot_at(engine, 5)]) if entry == "neighbour" else entry
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert {finding.pool for finding in caught.value.findings} == {"window"}
    assert {finding.code for finding in caught.value.findings} <= codes


def test_a_wrong_slot_in_a_row_is_found(monkeypatch):
    """An entry of the request table that names a neighbour is one incident of both pools."""
    engine = running_engine()
    [request] = engine.running
    table, place = engine.request_table.table, request.committed_len - 3
    table[request.row, place] = table[request.row, place - 1]
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    [finding] = caught.value.findings
    assert finding.code in ("R4", "R5")


def test_a_token_has_one_chain_in_both_groups():
    """The root of a window pool is that of the full one: its records name the same prefixes."""
    engine = running_engine()
    state = engine.canary.session.state
    for behind in range(1, WINDOW):
        full = slot_at(engine, behind)
        own = int(engine.windows.slot_map[full])
        chains = [int(state.by_name[name].records[slot, CHAIN]) for name, slot in (("target", full), ("window", own))]
        assert chains[0] == chains[1] != 0


def test_the_report_covers_the_window_pool_of_a_mixed_model():
    """Clean while it runs, and at the step whose entry is gone the position is named."""
    engine = running_engine(canary=CanaryConfig(mode="off"))
    assert [row.is_clean for row in engine.window_report()] == [True]
    [request] = engine.running
    engine.windows.slot_map[slot_at(engine, 2)] = 0
    [row] = engine.window_report()
    assert row.unmapped == (request.committed_len - 2,)


def test_a_recurrent_model_with_mixed_windows_is_refused():
    """Its attention layers are counted apart from the model's."""
    with pytest.raises(CheckpointError, match=r"must have one window or none, layers \[1\] see everything beside"):
        HybridDecoder(replace(parse_config(RAW), delta=DeltaShape(1, 1, 4, 4, 2), delta_layers=(0,)))
