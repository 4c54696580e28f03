"""The greatest over ranks in five processes: of tables that change, and where one of them is lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from kvcanary.ranks.greatest import NEUTRAL, Greatest

RANKS, ROUNDS, SECONDS = 5, 50, 20.0
LOST = 1  # the rank that ends; there is one behind it


def table(rank: int, number: int) -> list[int]:
    """Each rank has the greatest somewhere; the last one has fewer."""
    own = [(number * 31 + rank * 17) % 101 - 50, NEUTRAL if rank else number, -rank - number]
    return own if rank < RANKS - 1 else own[:2]


def whole(number: int) -> list[list[int]]:
    """What all ranks give, with nothing where a rank has no number."""
    return [[*table(rank, number), NEUTRAL][:3] for rank in range(RANKS)]


def serve(rank: int, folder: str) -> None:
    """All take part in ROUNDS calls; then one ends."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    greatest = Greatest(dist.group.WORLD, 5)
    told = {"given": [greatest(table(rank, number), SECONDS) for number in range(ROUNDS)], "lost": ""}
    start = time.monotonic()
    if rank != LOST:
        try:
            greatest(table(rank, 0), SECONDS)
        except RuntimeError as error:
            told["lost"] = str(error)
    told["seconds"] = time.monotonic() - start
    Path(folder, f"{rank}.told").write_text(json.dumps(told))
    while rank != LOST and len(list(Path(folder).glob("*.told"))) < RANKS:
        time.sleep(0.05)
    os._exit(0)  # without a word to the others


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(serve, (str(folder),), RANKS)
    return [json.loads((folder / f"{rank}.told").read_text()) for rank in range(RANKS)]


def test_every_rank_is_given_the_greatest_of_each_number(told):
    """In every call, whoever has it; where one has fewer numbers, of those that the others have."""
    due = [[max(column) for column in zip(*rows, strict=True)] for rows in map(whole, range(ROUNDS))]
    assert [one["given"] for one in told[:-1]] == [due] * (RANKS - 1)
    assert told[-1]["given"] == [own[:2] for own in due]


def test_who_waits_for_others_is_told_of_a_rank_that_is_lost(told):
    """At once, and not when its own time is over: one of the five expects nothing from it."""
    left = [one for rank, one in enumerate(told) if rank != LOST]
    assert all(one["lost"] and one["seconds"] < SECONDS / 2 for one in left)
    expecting = [told[(LOST + stride) % RANKS] for stride in (1, 2, 4)]
    assert "another rank waited for it" not in [one["lost"] for one in expecting]
