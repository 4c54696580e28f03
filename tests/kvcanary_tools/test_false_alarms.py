"""The measurement of false alarms: a small run of it, and the traffic that it is made of."""

from __future__ import annotations

import json

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary_tools.bench.toy import false_alarms
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.forwards import ToyShape
from kvcanary_tools.bench.toy.traffic import WEIGHTS, Load, Traffic

CHECKS, DISTINCT = 400_000, 8_000
NOT_POISONED = {"freed pages reused before they were poisoned"}  # under pressure, and counted


@pytest.fixture(scope="module")
def small_run() -> dict:
    return false_alarms.measure(CHECKS, DISTINCT, seed=1)


def make_traffic(seed: int = 0, shape: ToyShape | None = None, content: str = "full") -> Traffic:
    config = CanaryConfig(mode="raise", content=content, seed=7)
    return Traffic(ToyEngine(config, shape or ToyShape(), seed), Load(), seed)


def test_right_traffic_has_no_finding(small_run):
    """All phases together reach what was asked for, and found nothing."""
    assert small_run["slots_checked"] >= CHECKS
    assert small_run["distinct"] >= DISTINCT
    assert small_run["findings"] == 0
    assert {reason for phase in small_run["phases"] for reason in phase["unchecked"]} <= NOT_POISONED


def test_the_split_adds_up(small_run):
    """The totals are the sums of the phases, and both engines have their share."""
    phases = small_run["phases"]
    for key in ("slots_checked", "distinct", "findings"):
        assert small_run[key] == sum(phase[key] for phase in phases)
    assert {phase["phase"].split(",")[0] for phase in phases} == {"engine", "toy"}
    assert sum(phase.distinct for phase in false_alarms.TOY_PHASES) == pytest.approx(1)
    for kind in (false_alarms.TOY_PHASES, false_alarms.ENGINE_PHASES):
        assert sum(phase.checks for phase in kind) == pytest.approx(1)


def test_a_result_is_written_and_printed(monkeypatch, tmp_path, capsys, small_run):
    """The JSON is the result, and the last line of the table has the totals."""
    monkeypatch.setattr(false_alarms, "measure", lambda *_: small_run)
    false_alarms.main(["--json", str(tmp_path / "alarms.json")])
    assert json.loads((tmp_path / "alarms.json").read_text(encoding="utf-8")) == small_run
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert (last[0], last[1], last[-1]) == ("all", f"{small_run['slots_checked']:,}", "0")


@torch.inference_mode()
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_the_toy_engine_does_everything_without_a_finding(page_size, topk):
    """Chunks, trees, chains, decode, sharing, copies, eviction, cancellation and preemption, on pages of every size."""
    shape = ToyShape(page_size=page_size, topk=topk, num_pages=800 // page_size)
    traffic = make_traffic(page_size + topk, shape)
    traffic.run(400)
    traffic.end()
    assert set(traffic.counts) == set(WEIGHTS)
    assert page_size == 1 or traffic.engine.num_copies
    certificate = traffic.engine.canary.certificate()
    assert certificate["findings"] == []
    assert certificate["unchecked"].keys() <= NOT_POISONED
    assert sorted(traffic.engine.pages.all_free()) == list(range(1, shape.num_pages))


@torch.inference_mode()
def test_the_same_seed_gives_the_same_traffic():
    """A run that found something can be run again."""
    first, second = (make_traffic(5) for _ in range(2))
    assert [first.act() for _ in range(60)] == [second.act() for _ in range(60)]
    assert torch.equal(first.engine.pools["target"].kv, second.engine.pools["target"].kv)


@torch.inference_mode()
def test_distinct_counts_each_grant_of_a_slot_once():
    """Reading a slot again adds nothing; the same slot under a later grant does."""
    engine = ToyEngine(CanaryConfig(seed=7), ToyShape(num_pages=12))
    engine.start("first", 8)
    assert engine.distinct == 8
    engine.decode()
    engine.decode()
    assert engine.distinct == 10
    engine.finish("first")
    engine.start("second", 40)  # the free pages are too few to avoid those of the first
    assert engine.distinct == 50


@torch.inference_mode()
def test_distinct_counts_a_shared_page_once_and_its_copy_again():
    """A cache hit and a fork read slots under the grant that they have; what is copied has a grant of its own."""
    engine = ToyEngine(CanaryConfig(seed=7), ToyShape(num_pages=32))
    engine.start("first", 10)
    engine.share("first")
    engine.admit("hit", engine.rows["first"].tokens[:10])
    assert engine.acquire("hit") == 2
    engine.prefill({"hit": 10})
    assert engine.distinct == 10 + 2
    engine.fork_by_reference("first", "fork")
    engine.decode("fork")
    assert (engine.num_copies, engine.distinct) == (1, 10 + 2 + 3)
    engine.decode("first")
    assert (engine.num_copies, engine.distinct) == (1, 10 + 2 + 3 + 1)


@torch.inference_mode()
def test_a_page_that_is_not_copied_before_a_write_is_found():
    """Without its copy on write the toy engine writes into a page that two rows name: W3."""
    engine = ToyEngine(CanaryConfig(seed=7))
    engine.start("first", 10)
    engine.fork_by_reference("first", "fork")
    engine._own_last_page = lambda name: None
    with pytest.raises(KVCorruptionError) as caught:
        engine.decode("fork")
    assert caught.value.findings[0].code == "W3"


@torch.inference_mode()
def test_toy_traffic_is_watched():
    """A store that is lost is found: the silence of the right traffic is not that of a canary that looks away."""
    traffic = make_traffic(3)
    traffic.run(30)
    traffic.engine.change_store = lambda *store: None
    with pytest.raises(KVCorruptionError) as caught:
        traffic.run(30)
    assert caught.value.findings[0].code == "R12"
