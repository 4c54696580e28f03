"""Eager forwards that judge themselves on the device: the host hears behind the next launch, and no token leaves first.

A device that judges is a GPU's; here the CPU plays it, with the same operations in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.manager.device_substep import DeviceSubstep
from kvcanary.records.state import CanaryState
from kvcanary.replay.replayer import replay
from kvcanary_kernels.record.layout import CHAIN
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.acceptance.walk import NO_TOKEN
from spec_engine.attention import long_chunks
from spec_engine.attention.torch_backend import TorchAttention
from spec_engine.attention.triton_backend import TritonAttention
from spec_engine.models.embedded import load_excerpts
from spec_engine.request import TokenEvent

pytestmark = pytest.mark.usefixtures("early_slices")
PROMPTS = [excerpt.prompt[:60] for excerpt in load_excerpts()[20:23]]
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)
CHUNK = 8  # tokens: every prompt is forwarded in several steps
COVERAGE = ("forwards", "slots_checked", "slots_sealed", "unchecked", "findings")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Engine over the embedded model; ``on_device``: whether its eager forwards judge themselves."""

    def engine(on_device: bool = True, mode: str = "raise", content: str = "rolling", **settings: object) -> Engine:
        monkeypatch.setattr(CanaryState, "judges_on_device", on_device)
        canary = CanaryConfig(mode=mode, content=content, seed=5)
        common = {"draft": "none", "schedule": "overlap", "prefix_cache": False, "prefill_chunk_tokens": CHUNK}
        common |= {"page_size": 4, "max_total_tokens": 1024, "context_length": 160, "max_running_requests": 4}
        return Engine(EngineConfig(canary=canary, **common | settings))

    return engine


def damage(engine: Engine, number: int) -> None:
    """A record in the first page of a request."""
    engine.canary.session.state.by_name["target"].records[engine.running[number].pages[0] * 4 + 1, CHAIN] ^= 1 << 40


def run(engine: Engine, events: list[TokenEvent]) -> None:
    """To the end, or to what stops the engine; ``events`` are those that left."""
    while engine.has_work:
        events += engine.step()


def outcome(engine: Engine) -> tuple[list[tuple[int, ...]], dict[str, object]]:
    outputs = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    certificate = engine.canary.certificate()
    return outputs, {name: certificate[name] for name in COVERAGE}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"content": "write"},
        {"content": "full", "schedule": "sync"},
        {"graphs": "on"},
        {"draft": "auto", "topk": 2, "num_steps": 2},
        {"draft": "auto", "topk": 1, "content": "full"},
        {"kv_cache_dtype": "fp8_e4m3", "content": "full"},
    ],
    ids=str,
)
def test_it_is_judged_as_on_the_host(make, settings):
    """The same tokens, and as much is checked."""
    assert outcome(make(**settings)) == outcome(make(on_device=False, **settings))


def test_a_prefill_is_launched_before_the_last_one_is_collected(make):
    """Chunk after chunk; the tokens that the last of them samples are not asked for either."""
    engine = make()
    engine.submit(PROMPTS[0], GREEDY)
    flights, reported = [], []
    while not engine.running or engine.running[0].chunk_start < engine.running[0].prefill_len:
        assert engine.step() == []
        result = engine._pending[-1].result
        flights.append(result.flight)
        reported += [token for part in result.parts for token in part.tokens]
    assert len(flights) > 2
    assert [flight.is_collected for flight in flights[:-1]] == [True] * (len(flights) - 1)
    assert not flights[-1].is_collected
    assert reported == [NO_TOKEN]


@pytest.mark.parametrize("chunks", [2, 4])
def test_no_token_leaves_a_prefill_that_read_damage(make, chunks):
    """Mode raise: the step that reads it, and those launched behind it, give nothing, even where it sampled a token."""
    prompt_len = len(make(mode="off").tokenizer.encode(PROMPTS[0]))
    engine = make(prefill_chunk_tokens=-(-prompt_len // chunks))
    engine.submit(PROMPTS[0], GREEDY)
    assert engine.step() == []
    damage(engine, 0)
    events: list[TokenEvent] = []
    with pytest.raises(KVCorruptionError) as caught:
        run(engine, events)
    assert events == []
    assert [(finding.code, finding.step) for finding in caught.value.findings] == [("R3", 2)]
    assert not engine._pending


def test_in_mode_abort_the_others_go_on(make):
    """The damaged request ends without any token; the others say what they always say."""
    truths = [output.token_ids for output in make(mode="off").generate(PROMPTS[:2], GREEDY)]
    engine = make(mode="abort", prefill_chunk_tokens=64)
    names = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
    assert engine.step() == []
    damage(engine, 0)
    left: dict[str, list[int]] = {name: [] for name in names}
    reasons = {}
    while engine.has_work:
        for event in engine.step():
            left[event.request_id] += event.token_ids
            reasons[event.request_id] = event.finish_reason
    assert reasons[names[0]] == "kv_corruption"
    assert left[names[0]] == [] or tuple(left[names[0]]) == truths[0][:1]  # sampled before the damage
    assert tuple(left[names[1]]) == truths[1]


def test_an_index_outside_the_pool_reads_the_null_slot(make):
    """R1: the body never sees it, and its request ends."""
    engine = make(mode="abort")
    engine.submit(PROMPTS[0], GREEDY)
    engine.step()
    engine.request_table.table[engine.running[0].row, 3] = 1 << 40
    events = []
    while engine.has_work:
        events += engine.step()
    assert [event.finish_reason for event in events] == ["kv_corruption"]
    assert "R1" in {finding.code for finding in engine.canary.findings}


def test_a_write_that_is_refused_stores_nothing(make):
    """W2: the slot of another request keeps record and bytes, and that request goes on."""
    truth = make(mode="off").generate(PROMPTS[1:2], GREEDY)[0].token_ids
    engine = make(mode="abort", prefill_chunk_tokens=2 * CHUNK)
    engine.submit(PROMPTS[0], GREEDY)
    engine.submit(PROMPTS[1], GREEDY)
    engine.step()
    first, second = engine.running
    grow = engine.memory.grow

    def steal(request, *sizes):
        taken = grow(request, *sizes)
        if request is first:
            engine.request_table.table[first.row, first.chunk_start] = stolen
        return taken

    while not second.committed_len:
        engine.step()
    stolen = engine.request_table.table[second.row, 0].clone()
    engine.memory.grow = steal
    left = []
    while engine.has_work:
        left += [event for event in engine.step() if event.request_id == second.request_id]
    assert first.finish_reason == "kv_corruption"
    assert engine.canary.findings[0].code == "W2"
    assert tuple(token for event in left for token in event.token_ids) == truth


def test_salts_of_their_own_are_judged_too(make):
    """Requests of one forward whose chains have different roots."""
    engine = make(max_running_requests=2)
    names = [engine.submit(PROMPTS[0], GREEDY, salt=salt) for salt in ("", "other")]
    left: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work:
        for event in engine.step():
            left[event.request_id] += event.token_ids
    assert left[names[0]] == left[names[1]] != []
    assert engine.canary.certificate()["findings"] == []


def test_its_dump_replays(make, tmp_path):
    """A recording of such forwards is one of eager forwards: the replay finds again what was found."""
    engine = make(mode="log")
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    for _ in range(3):
        engine.step()
    damage(engine, 0)
    with torch.inference_mode():
        while engine.has_work:
            engine.step()
    assert engine.canary.findings
    outcome = replay(read_dump(engine.canary.dump(tmp_path / "dump")))
    assert outcome.errors == []
    assert outcome.missing == []


@pytest.fixture
def defer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[str]]:
    """Let an engine do as on a GPU, whose first chunks attend before anything is opened; what happens is noted."""
    events: list[str] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        events.append("attends alone")
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), q[..., 0]

    def deferred(engine: Engine) -> list[str]:
        for name, value in (("LEAST_LONG", CHUNK), ("LENGTH_STEP", CHUNK), ("_has_cudnn", lambda *_: True)):
            monkeypatch.setattr(long_chunks, name, value)
        monkeypatch.setattr(long_chunks, "_pass", attend)
        monkeypatch.setattr(TorchAttention, "alone", TritonAttention.alone)
        drafter = engine.runner.drafter
        for forwards in [engine.runner.forwards, *([] if drafter is None else [drafter.forwards])]:
            forwards.defers = True
        engine.memory.defers = True
        monkeypatch.setattr(engine.request_table, "flush", noted("flush", engine.request_table.flush))
        for name in ("begin_step", "admit", "on_alloc", "end_step") if engine.canary else ():
            monkeypatch.setattr(engine.canary, name, noted(name, getattr(engine.canary, name)))
        if engine.canary:
            monkeypatch.setattr(DeviceSubstep, "_launch", noted("launch", DeviceSubstep._launch))
        return events

    def noted(name: str, method: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            events.append(name)
            return method(*args, **kwargs)

        return call

    return deferred


def test_it_is_told_of_a_prompt_behind_its_first_layer(make, defer):
    """Admission, pages and the opening come when the device has a layer to compute; each once, in their order."""
    engine = make()
    events = defer(engine)
    engine.submit(PROMPTS[0], GREEDY)
    engine.step()
    assert events == ["begin_step", "attends alone", "admit", "on_alloc", "flush", "launch", "end_step"]
    events.clear()
    engine.step()  # a chunk behind others reads the pool at once
    assert events == ["begin_step", "on_alloc", "flush", "launch", "end_step"]


def test_it_is_told_of_several_prompts_behind_their_first_layer(make, defer):
    """Their rows are written before: the indices of several are copied when they are put together."""
    engine = make(prefill_chunk_tokens=2 * CHUNK)
    events = defer(engine)
    for prompt in PROMPTS[:2]:
        engine.submit([*engine.tokenizer.encode(prompt)][:CHUNK], GREEDY)
    engine.step()
    reported = ["admit", "admit", "on_alloc", "on_alloc", "flush"]
    assert events == ["begin_step", "flush", "attends alone", *reported, "launch", "end_step"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"content": "full"},
        {"prefix_cache": True},
        {"draft": "auto", "topk": 2, "num_steps": 2},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"max_total_tokens": 176, "new_token_ratio": 0.1},
    ],
    ids=str,
)
def test_what_is_told_later_is_judged_as_ever(make, defer, settings):
    """The same tokens, and as much is checked."""
    engine = make(**settings)
    events = defer(engine)
    found = outcome(engine)
    assert ("attends alone" in events) is ("kv_cache_dtype" not in settings)
    assert found == outcome(make(**settings))


def test_an_engine_without_a_canary_says_the_same(make, defer):
    """Its rows are written behind the first layer too."""
    engine = make(mode="off")
    events = defer(engine)
    tokens = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    assert events[:2] == ["attends alone", "flush"]
    assert tokens == [output.token_ids for output in make(mode="off").generate(PROMPTS, GREEDY)]


def test_a_first_layer_that_never_stores_is_found(make, defer, monkeypatch):
    """It has attended already: R12, and the layer is named."""
    engine = make(mode="log")
    defer(engine)
    monkeypatch.setattr(TorchAttention, "store", forgetful(TorchAttention.store, layer=0))
    engine.generate(PROMPTS[:1], GREEDY)
    first = engine.canary.findings[0]
    assert (first.code, first.step, first.found["missing"]) == ("R12", 1, [0])


def forgetful(store: Callable, layer: int) -> Callable:
    """A store that leaves a layer out."""

    def stored(self: TorchAttention, which: int, *values: torch.Tensor) -> None:
        if which != layer:
            store(self, which, *values)

    return stored
