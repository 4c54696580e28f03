"""Engines whose model is cut over gloo processes: one rank's tokens, and a rank that differs is found."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo here")

CLEAN = [
    ("clean", "sync", "drafts", "0.8", "512", "100"),
    ("clean", "overlap", "drafts", "0.0", "512", "100"),
    ("clean", "overlap", "none", "0.8", "96", "100"),  # so few slots that requests go to the host tier and come back
]
SHORT = ("clean", "sync", "drafts", "0.8", "512", "40")
FAULTS = {
    "token/sync": ("X1", "tokens", "req-0"),
    "token/overlap": ("X1", "tokens", "req-0"),
    "pool size/sync": ("X1", "shape", None),
    "host pages/sync": ("X1", "shape", None),
    "seed/sync": ("X1", "seed", None),
    "pages/sync": ("X1", "pages", "req-4"),
    "page count/sync": ("X1", "pages", None),
    "hits/sync": ("X1", "rows", "req-6"),
    "completions/overlap": ("X1", "step", None),
    "reduce/sync": ("X1", "lengths", "req-3"),
    "sum/overlap": ("X2", "hidden states", None),
    "draft K/sync": ("X2", "copies of the draft pool", None),
    "shared head/overlap": ("X2", "copies of the target pool", None),
}
LOST = ("lost",)  # last: its group is broken then


@pytest.fixture(scope="module")
def rank_processes() -> ModuleType:
    """The file beside this one, under a name that spawned processes import too."""
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("rank_processes")
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def pair(rank_processes, tmp_path_factory) -> list[dict[str, Any]]:
    return rank_processes.in_processes(2, [("dtensor",), *CLEAN], tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def triple(rank_processes, tmp_path_factory) -> list[dict[str, Any]]:
    return rank_processes.in_processes(
        3,
        [SHORT, *(("fault", *name.split("/")) for name in FAULTS), ("left",), LOST],
        tmp_path_factory.mktemp("triple"),
    )


@pytest.mark.parametrize("case", CLEAN, ids="/".join)
def test_two_ranks_give_the_tokens_of_one(rank_processes, pair, case):
    """Greedy, sampled, with drafts, under both schedules and through the host tier, in as many steps, nothing found."""
    _, schedule, drafts, temperature, tokens, steps = case
    settings = {"schedule": schedule, "drafts": drafts == "drafts", "max_total_tokens": int(tokens)}
    engine = rank_processes.make(rank_processes.target(2), **settings)
    expected = rank_processes.run_long(engine, float(temperature), int(steps))
    for told in pair:
        assert told["/".join(case)]["tokens"] == expected
        assert told["/".join(case)]["steps"] == engine._step_number
    assert [told["/".join(case)]["heads"] for told in pair] == [[0, 2], [1, 2]]
    assert (engine.metrics.restored_tokens > 0) == (tokens == "96")


def test_a_layer_is_that_of_torchs_tensor_parallel_tensors(pair):
    """Products, the two sums and the cut of q, k and v, to the last bits of float64."""
    for told in pair:
        assert max(told["dtensor"].values()) < 1e-12


@pytest.mark.slow
def test_three_ranks_share_a_kv_head(rank_processes, triple):
    """Where ranks outnumber KV heads each holds a copy, and gives the tokens of one rank."""
    expected = rank_processes.run_long(rank_processes.make(rank_processes.target(3)), 0.8, int(SHORT[-1]))
    assert [told["/".join(SHORT)]["tokens"] for told in triple] == [expected] * 3
    assert [told["/".join(SHORT)]["heads"] for told in triple] == [[0, 1]] * 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_differs_is_named(triple, fault):
    """All ranks are told the same: the code, what differs, whose it is, and which rank is alone."""
    told = [one[f"fault/{fault}"] for one in triple]
    assert told[0]["found"] == told[1]["found"] == told[2]["found"]
    for one in told:
        assert (one["code"], one["found"]["level"], one["reader"]) == FAULTS[fault]
        assert one["found"]["alone"] == [2]
        assert one["causes"][0]["family"] == "ranks"
        assert "alone: rank 2" in one["evidence"][0]


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_found_in_its_step(triple, fault):
    """Before a token of the step leaves; under overlap the host collects a step behind the next launch.

    What a draft's extend has stored is recorded with the next step: no token of its own step comes from that.
    """
    told = triple[2][f"fault/{fault}"]
    first = told["struck"][0] if told["struck"] else 0  # else it was started wrong
    may_lag = fault.endswith("/overlap") or fault.startswith("draft K")
    assert told["step"] - first in ((0, 1) if may_lag else (0,))


def test_copies_are_told_with_layer_and_slot(triple):
    """Where other bits lie, on every rank alike."""
    for name, pool, layer in (("draft K/sync", "draft", 0), ("shared head/overlap", "target", 1)):
        told = [one[f"fault/{name}"] for one in triple]
        assert [(one["pool"], one["layer"]) for one in told] == [(pool, layer)] * 3
        assert told[0]["slot"] == told[1]["slot"] == told[2]["slot"] >= 4


def test_no_token_is_told(triple):
    """Ids of tokens stay out of findings."""
    assert set(triple[0]["fault/token/sync"]["found"]) == {"level", "alone", "resource"}
    assert set(triple[0]["fault/pages/sync"]["found"]) == {"level", "alone", "resource", "by_rank"}


def test_a_rank_that_leaves_is_no_difference(triple):
    """The others hear of it with their next step, and wait for nobody."""
    assert [told["left"] for told in triple] == [["kvcanary.ranks_not_compared"], ["kvcanary.ranks_not_compared"], []]


def test_a_rank_that_does_not_come_is_told(triple):
    """Within the timeout, with the step and the last one agreed."""
    for told in triple[:2]:
        assert told["lost"].startswith("a rank did not report for step 2; last agreed: 1")
    assert triple[2]["lost"] == ""
