"""Benchmarks of an 8B model on a GPU, run small on a CPU: what takes turns with what, and what is kept of it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from kvcanary.config import ROTATION_STEPS
from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.gpu import drafted_step, fitting, host_work, scaling, step
from kvcanary_tools.bench.vllm import beside as beside_vllm
from spec_engine.models.config import load_config
from spec_engine.models.decoder import Decoder

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}
HERE = {"device": "cpu", "attention_backend": "torch"}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A model of few numbers, prompts of few tokens, and rounds of few steps."""
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(step, "LLAMA_8B", step.LLAMA_8B | SHAPE)
    for name, value in {"PROMPT_LEN": 40, "STEPS": 3, "WARM_STEPS": 2}.items():
        monkeypatch.setattr(step, name, value)
    monkeypatch.setattr(beside_vllm, "PREFILL_LEN", 36)
    monkeypatch.setattr(drafted_step, "SUBSTEP_STEPS", 2)
    return step.random_decoder(step.LLAMA_8B, "cpu")


@pytest.mark.parametrize("drafts", list(drafted_step.DRAFTS))
def test_drafted_steps_and_their_substeps_are_timed(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, drafts: str
) -> None:
    """Each canary over none, of the whole step and of a substep, every engine once first, second and last."""
    made: list[str] = []
    make = drafted_step._engine
    monkeypatch.setattr(drafted_step, "_engine", lambda name, *rest: made.append(name) or make(name, *rest))
    row = drafted_step.measure(drafts, 2, model, drafted_step.random_head(model), 2, **HERE)
    canaries = {"write", "rolling"}
    orders = [made[first : first + 3] for first in range(0, len(made), 3)]
    assert len(orders) == row["places"] == 3
    assert all(set(place) == {"off", *canaries} for place in (*orders, *zip(*orders, strict=True)))
    assert row["over_off"].keys() == row["substep_added_us"].keys() == row["certificates"].keys() == canaries
    assert 0 < min(row["substep_us"].values()) <= 1e3 * row["off_ms"]
    assert row["tokens_a_step"] >= 1
    assert all(certificate["findings"] == [] for certificate in row["certificates"].values())
    for added in row["substep_added_us"].values():
        assert added["min"] <= added["median"] <= added["max"]
    row["certificates"].clear()
    drafted_step.tell(row)


def hybrid() -> Decoder:
    parts = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
    own = {f"linear_{part}": size for part, size in parts.items()} | {"num_hidden_layers": 4, "head_dim": 8}
    return step.random_decoder(step.QWEN_9B | SHAPE | own, "cpu")


@pytest.mark.slow
def test_drafted_steps_of_a_hybrid_are_timed(model: Decoder) -> None:
    """Its states are watched, of which each node of a draft leaves one."""
    own = hybrid()
    row = drafted_step.measure("chain", 2, own, drafted_step.random_head(own), 2, **HERE)
    for certificate in row["certificates"].values():
        assert (certificate["findings"], certificate["states_checked"] > 0) == ([], True)


def test_states_of_drafts_take_room() -> None:
    """A hybrid's request has one more state for each node of its drafts."""
    model = hybrid()
    entries, state = int(100 * fitting.slot_bytes(model) * fitting.RECORDS), fitting.state_bytes(model)
    free = fitting.SPARE + 8 * (entries + 5 * state)
    assert [fitting.fit(64, 1, 100, model, free, nodes).requests for nodes in (4, 5)] == [8, 6]


@pytest.mark.parametrize("drafts", ["none", "chain", "tree"])
def test_the_hosts_work_for_the_canary_is_timed(model: Decoder, monkeypatch: pytest.MonkeyPatch, drafts: str) -> None:
    """Of a lagging host: what its canary adds to its work in a step, and what of that lies within calls of it."""
    monkeypatch.setattr("kvcanary.records.state.CanaryState.judges_on_device", True)
    row = host_work.measure(drafts, 2, model, drafted_step.random_head(model), 2, **HERE)
    assert (row["drafts"], row["batch"]) == (drafts, 2)
    assert row["calls"] > 8
    assert 0 < row["canary_us"] < row["work_us"]["rolling"] < 1e6
    assert row["work_us"]["off"] > 0  # of which the forwards are most here, so that no two rounds tell which is more
    assert row["added_us"] == pytest.approx(row["work_us"]["rolling"] - row["work_us"]["off"], abs=0.2)
    assert row["percent_of_step"] == pytest.approx(100 * row["added_us"] / row["off_us"], abs=0.01)
    assert 1 < row["turn_ns"] < 1e4
    host_work.tell(row)


def test_each_moment_of_the_host_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the innermost that keeps time, also where it raises."""
    now = iter(range(100))
    monkeypatch.setattr(host_work.time, "perf_counter", lambda: next(now))
    shares = host_work.Shares()
    wait = shares.around("wait", lambda: None)

    def judge() -> None:
        wait()
        raise ValueError

    with pytest.raises(ValueError):
        shares.around("canary", judge)()
    assert (shares.seconds, shares.calls) == ({"canary": 2, "wait": 1}, {"canary": 1, "wait": 1})


def test_everything_that_an_engine_calls_of_its_canary_is_timed(model: Decoder) -> None:
    """Methods of the manager, of its parts and of the tracker of operations; the engine's own part; waits."""
    canary = step.make_engine(1, model, step.CANARIES["rolling"], 4, max_total_tokens=256, **HERE).canary
    named = (
        (owner if isinstance(owner, type) else type(owner), name, who) for owner, name, who in host_work.entries(canary)
    )
    names = {f"{owner.__name__}.{name}": who for owner, name, who in named}
    asked = ("CanaryManager.end_step", "CanaryManager.append_all", "AsyncTracker.issue", "Together.launch")
    assert {names[name] for name in asked} == {"canary"}
    assert names["Event.synchronize"] == "wait"
    assert not any(name.partition(".")[2].startswith("_") for name in names)


def test_a_substep_lasts_from_one_draft_forward_to_the_next(model: Decoder) -> None:
    """As many as there are draft forwards, in the order of a step; nothing is marked outside."""
    marks = drafted_step.Marks()
    with marks.placed():
        head, settings = drafted_step.random_head(model), {"topk": 2, "num_steps": 3, "max_total_tokens": 256}
        engine = step.make_engine(1, model, step.CANARIES["off"], 4, head, **settings, **HERE)
    step.fill(engine, 1, 4)
    before = marks.seconds()
    engine.step()
    assert marks.seconds() == before
    with marks.placed():
        engine.step()
    assert len(marks.seconds()) == 2
    assert min(marks.seconds()) > 0


def test_what_a_canary_adds_is_measured_in_pools_of_all_sizes(model: Decoder) -> None:
    """The same requests, twice the slots: both canaries over none, nothing found."""
    rows = [scaling.measure(2, 20, times, model, 2, **HERE) for times in (1, 2)]
    assert rows[1]["slots"] == 2 * rows[0]["slots"]
    for row in rows:
        assert (row["requests"], row["tokens"], row["findings"]) == (2, 20, 0)
        assert row["added_us"].keys() == {"write", "rolling"}
        assert row["off_ms"] > 0


def test_vllm_and_ours_take_turns_at_equal_contexts(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills and decode steps of both, the first of a round by turns; who is behind catches up before."""
    order: list[str] = []

    class Noted(beside_vllm.Ours):
        def __init__(self, name: str, ahead: int) -> None:
            super().__init__("off", 2, model, **HERE)
            self.name, self.ahead = name, ahead

        def prefill(self, prompts: beside_vllm.Prompts) -> float:
            order.append(f"{self.name} prefill")
            return super().prefill(prompts)

        def fill(self, prompts: beside_vllm.Prompts) -> None:
            super().fill(prompts)
            for _ in range(self.ahead):
                self.advance()

        def decode(self) -> float:
            order.append(f"{self.name} decode")
            return super().decode()

    monkeypatch.setattr(beside_vllm, "DECODE_ROUNDS", 2)
    theirs, ours = Noted("theirs", 5), Noted("ours", 0)
    prefill, decode = beside_vllm.compare(2, theirs, ours, 2)
    assert prefill["ratio"].keys() == decode["ratio"].keys() == {"median", "min", "max"}
    assert (prefill["rounds"], decode["rounds"]) == (2, 2)
    assert abs(decode["context"]["vllm"] - decode["context"]["ours"]) < 1
    turns = [(name.split()[1], (name.split()[0], other.split()[0])) for name, other in pairwise(order)][2::2]
    assert turns == [(of, who) for of in ("prefill", "decode") for who in (("theirs", "ours"), ("ours", "theirs"))]
    assert not theirs.engine.running
    assert "canary off: vLLM" in beside_vllm.reported({"requests": 2, "canary": "off", **decode})


def test_what_is_late_ends_with_a_whole_round(model: Decoder) -> None:
    """One round of the part that runs, and no further part."""
    theirs, ours = (beside_vllm.Ours("off", 1, model, **HERE) for _ in range(2))
    (row,) = beside_vllm.compare(1, theirs, ours, 8, lambda: True)
    assert (row["of"], row["rounds"]) == ("prefill", 1)


def test_vllm_reads_the_shape_that_ours_has(tmp_path) -> None:
    """The folder that it loads says the same to our loader as the shape itself."""
    beside_vllm.write_config(tmp_path)
    config = load_config(tmp_path)
    assert (config.num_layers, config.hidden_size, config.num_kv_heads, config.head_dim) == (32, 4096, 8, 128)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "llama"
    assert step.LLAMA_8B.items() <= raw.items()


def recorded(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("name", ["gpu_step", "gpu_drafted_step", "gpu_drafted_step_hybrid"])
def test_recorded_steps_reread_all_live_bytes_within_a_rotation(name: str) -> None:
    """The rolling check of the engines that were timed: no committed byte has waited longer, and nothing was found."""
    for row in recorded(name):
        certificate = row["certificates"]["rolling"]
        assert 0 < certificate["max_unread_steps"] <= ROTATION_STEPS
        assert certificate["bytes_checked"] > certificate["peak_live_bytes"]
        assert certificate["findings"] == []


def test_recorded_costs_are_flat_in_the_pool_and_at_most_linear_in_rows_and_tokens() -> None:
    """What the rolling check adds to a step: a quarter more at most in larger pools; less than its share of tokens."""
    added = {
        (row["requests"], row["tokens"], row["pool_times"]): row["added_us"]["rolling"]["median"]
        for row in recorded("gpu_scaling")
    }
    for times in (8, 32):
        assert added[1, 4096, times] <= 1.25 * added[1, 4096, 1]
    assert added[16, 4096, 1] <= 16 * added[1, 4096, 1]
    assert added[16, 4096, 1] <= 8 * added[16, 512, 1]
