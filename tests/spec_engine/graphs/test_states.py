"""Recurrent states in captured steps: the same tokens on every schedule, and each fault found in its step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary import CanaryConfig, Finding, KVCorruptionError
from kvcanary_kernels.engine.delta_shape import DeltaShape
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.graphs.states import StaticStates
from spec_engine.mock import MockTokenizer, with_random_weights
from spec_engine.models.config import ModelConfig
from spec_engine.models.eagle import Eagle
from spec_engine.models.hybrid import HybridDecoder

HEAD = ModelConfig("LlamaForCausalLM", 16, 24, 1, 2, 1, 8, 50, 128, target_hidden_size=16)
CONFIG = replace(HEAD, num_layers=4, delta=DeltaShape(1, 2, 3, 4, 3), delta_layers=(0, 2))
PROMPTS = [[3, 14, 15, 9, 26], [5, 35, 8], list(range(40, 19, -1))]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def hybrid_engine(device: str = "cpu", **settings: object) -> Engine:
    """Two of four layers keep states; a random EAGLE head drafts unless ``draft`` is none."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    target = with_random_weights(HybridDecoder(CONFIG), 6, dtype).to(device)
    head = with_random_weights(Eagle(HEAD, target), 6, dtype).to(device)
    defaults = {"dtype": "float64" if device == "cpu" else "float32", "device": device, "max_total_tokens": 1024}
    defaults |= {"prefill_chunk_tokens": 8, "page_size": 4, "graphs": "on", "num_steps": 3, "topk": 3}
    defaults |= {"canary": CanaryConfig(mode="raise", content="full"), "draft": "auto"}
    config = EngineConfig(**defaults | settings)
    return Engine(config, model=target, draft=None if config.draft == "none" else head, tokenizer=MockTokenizer())


def tokens_of(engine: Engine, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, params)]


@pytest.fixture(scope="module", params=DEVICES)
def plain(request: pytest.FixtureRequest) -> tuple[str, list[tuple[int, ...]]]:
    """A device, and greedy output there without drafts, graphs or canary."""
    settings = {"draft": "none", "graphs": "off", "schedule": "sync", "canary": CanaryConfig(mode="off")}
    return request.param, tokens_of(hybrid_engine(request.param, **settings))


@pytest.mark.parametrize("content", ["write", "rolling", "full"])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("drafting", [{"draft": "none"}, {"topk": 1}, {"topk": 3, "num_draft_tokens": 9}])
def test_tokens_are_those_of_plain_decoding(plain, drafting: dict, schedule: str, content: str) -> None:
    """Each step judges a state of every row, and the canary is silent."""
    device, expected = plain
    canary = CanaryConfig(mode="raise", content=content)
    engine = hybrid_engine(device, schedule=schedule, canary=canary, **drafting)
    assert tokens_of(engine) == expected
    certificate = engine.canary.certificate()
    assert certificate["findings"] == []
    assert certificate["unchecked"] == {}
    assert certificate["states_checked"] >= engine.metrics.verify_forwards


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_steps_that_the_host_decides_commit_there(schedule: str) -> None:
    """Sampled tokens are those of an engine without graphs."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
    wanted = tokens_of(hybrid_engine(graphs="off", schedule="sync"), params)
    engine = hybrid_engine(schedule=schedule)
    assert tokens_of(engine, params) == wanted
    assert engine.canary.certificate()["findings"] == []


def test_rows_come_and_go() -> None:
    """Retraction, and one row for several requests; batches that no bucket holds run without graphs."""
    wanted = tokens_of(hybrid_engine(draft="none", graphs="off", schedule="sync"))
    for room in {"max_total_tokens": 112, "new_token_ratio": 0.0}, {"max_running_requests": 1}, {"graph_buckets": (2,)}:
        engine = hybrid_engine(schedule="overlap", **room)
        assert tokens_of(engine) == wanted
        assert engine.canary.certificate()["findings"] == []


def rotated(states: StaticStates) -> None:
    """Rows go on from each other's states."""
    live = int(states._hooked.rows.feed[states._hooked.rows.live])
    states._sources[:live] = states._sources[:live].roll(1)


def begins_with(fault):
    """`begin`, and then the fault, before the canary looks and the forward reads."""
    inner = StaticStates.judge

    def judge(states: StaticStates, lens: torch.Tensor) -> None:
        fault(states)
        inner(states, lens)

    return {"judge": judge}


def flipped(states: StaticStates) -> None:
    states._pool.entries[1, states._sources[0], 2] += 0.5


def commits(change):
    """`commit`, of other nodes."""
    inner = StaticStates.commit

    def commit(states: StaticStates, accepted, is_decided: torch.Tensor) -> None:
        inner(states, *change(accepted, is_decided))

    return {"commit": commit}


def of_the_root(accepted, is_decided):
    return replace(accepted, lens=torch.ones_like(accepted.lens)), is_decided


def of_nobody(accepted, is_decided):
    return accepted, torch.zeros_like(is_decided)


FAULTS = {
    "another row's": (begins_with(rotated), "R8", {"draft": "none"}),
    "another row's, drafting": (begins_with(rotated), "R8", {}),
    "other bytes": (begins_with(flipped), "R9", {}),
    "the root's": (commits(of_the_root), "R4", {}),
    "not committed": (commits(of_nobody), "R4", {}),
}
CAUSES = {
    "the root's": "behind the verify the state of another accepted count was kept",
    "not committed": "the last verify's state was not copied to where its row goes on",
}


def first_finding(monkeypatch: pytest.MonkeyPatch, name: str, schedule: str) -> Finding:
    changes, _, settings = FAULTS[name]
    for method, change in changes.items():
        monkeypatch.setattr(StaticStates, method, change)
    engine = hybrid_engine(schedule=schedule, **settings)
    with pytest.raises(KVCorruptionError) as caught:
        tokens_of(engine)
    return caught.value.findings[0]


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_state_is_found_in_its_step(monkeypatch: pytest.MonkeyPatch, name: str, schedule: str) -> None:
    """Which entry, how much it has absorbed and who wrote it; no token of the step leaves."""
    finding = first_finding(monkeypatch, name, schedule)
    assert finding.code == FAULTS[name][1]
    assert finding.entry is not None
    assert finding.pool == "recurrent"
    assert finding.reader is not None


@pytest.mark.parametrize("name", CAUSES)
def test_what_was_kept_in_the_place_of_a_state_is_said(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From how much lies there, and since which step: the device has written over the rest."""
    assert first_finding(monkeypatch, name, "sync").causes[0].text == CAUSES[name]


def test_a_state_that_was_not_cleared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request begins from what another one left in the row."""
    engine = hybrid_engine(max_running_requests=1)
    inner = type(engine.states).reset

    def reset(pool, row: int) -> None:
        kept = pool.states[:, row].clone()
        inner(pool, row)
        pool.states[:, row] = kept

    monkeypatch.setattr(type(engine.states), "reset", reset)
    with pytest.raises(KVCorruptionError) as caught:
        tokens_of(engine)
    assert caught.value.findings[0].code == "R12"


def test_a_forward_whose_states_nobody_judges_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """H1: the host counts states, too."""
    monkeypatch.setattr(StaticStates, "judge", lambda states, lens: None)
    with pytest.raises(KVCorruptionError) as caught:
        tokens_of(hybrid_engine())
    assert caught.value.findings[0].code == "H1"
