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
    ("clean", "sync", "drafts", "0.8", "512"),
    ("clean", "overlap", "drafts", "0.0", "512"),
    ("clean", "overlap", "none", "0.8", "96"),  # so few slots that requests go to the host tier and come back
]
FAULTS = [
    ("fault", "token", "sync"),
    ("fault", "token", "overlap"),
    ("fault", "shape", "sync"),
    ("fault", "pages", "sync"),
    ("fault", "page count", "sync"),
    ("fault", "reduce", "sync"),
]
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
    return rank_processes.in_processes(2, CLEAN, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def triple(rank_processes, tmp_path_factory) -> list[dict[str, Any]]:
    return rank_processes.in_processes(3, [CLEAN[0], *FAULTS, LOST], tmp_path_factory.mktemp("triple"))


@pytest.mark.parametrize("case", CLEAN, ids="/".join)
def test_two_ranks_give_the_tokens_of_one(rank_processes, pair, case):
    """Greedy, sampled, with drafts, under both schedules and through the host tier, in as many steps, nothing found."""
    _, schedule, drafts, temperature, tokens = case
    settings = {"schedule": schedule, "drafts": drafts == "drafts", "max_total_tokens": int(tokens)}
    engine = rank_processes.make(rank_processes.target(2), **settings)
    expected = rank_processes.run(engine, float(temperature))
    for told in pair:
        assert told["/".join(case)]["tokens"] == expected
        assert told["/".join(case)]["steps"] == engine._step_number
    assert [told["/".join(case)]["heads"] for told in pair] == [[0, 2], [1, 2]]
    assert (engine.metrics.restored_tokens > 0) == (tokens == "96")


def test_three_ranks_share_a_kv_head(rank_processes, triple):
    """Where ranks outnumber KV heads each holds a copy, and gives the tokens of one rank."""
    expected = rank_processes.run(rank_processes.make(rank_processes.target(3)), 0.8)
    assert [told["/".join(CLEAN[0])]["tokens"] for told in triple] == [expected] * 3
    assert [told["/".join(CLEAN[0])]["heads"] for told in triple] == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("fault", "level", "step", "place"),
    [
        ("token/sync", "tokens", 6, "req-0"),
        ("token/overlap", "tokens", None, "req-0"),
        ("shape/sync", "shape", 0, None),
        ("pages/sync", "pages", None, "req-4"),
        ("page count/sync", "pages", 6, None),
        ("reduce/sync", "lengths", 6, "req-3"),
    ],
)
def test_a_rank_that_differs_is_named(triple, fault, level, step, place):
    """All ranks are told the same: the step, what differs, whose it is, and which rank is alone."""
    told = [one[f"fault/{fault}"] for one in triple]
    assert told[0] == told[1] == told[2]
    assert (told[0]["level"], told[0]["request"], told[0]["minority"]) == (level, place, [2])
    assert step is None or told[0]["step"] == step
    assert "alone: rank 2" in told[0]["text"]


def test_a_rank_that_does_not_come_is_told(triple):
    """Within the timeout, with the step and the last one agreed."""
    for told in triple[:2]:
        assert told["lost"].startswith("a rank did not report for step 2; last agreed: 1")
    assert triple[2]["lost"] == ""
