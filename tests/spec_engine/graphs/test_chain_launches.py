"""With topk 1 a captured drafting step compares no scores: what that saves is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcanary_tools.bench.gpu.chain import grown_as_trees, launches
from spec_engine import Engine
from spec_engine.drafting.drafter import Drafter

SHAPE = {"topk": 1, "num_steps": 4, "graph_buckets": [2], "max_running_requests": 2}
SCORING = {"topk", "sort", "softmax"}
VIEWS = {"unsqueeze", "view", "expand_as"}


class _Operations(TorchDispatchMode):
    """Names of what runs, and of what is given scores, which are `seen` to lie somewhere."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.names, self.of_scores, self._seen = Counter(), set(), seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.strip("_")
        self.names[name] += 1
        places = {one.untyped_storage().data_ptr() for one in self._seen}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if any(one.untyped_storage().data_ptr() in places for one in given):
            self.of_scores.add(name)
        return func(*args, **kwargs or {})


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every tensor of probabilities that a draft model's proposals come with."""
    seen, likeliest = [], Drafter.likeliest

    def kept(drafter: Drafter, hidden: Tensor) -> tuple[Tensor, Tensor]:
        probs, ids = likeliest(drafter, hidden)
        seen.append(probs)
        return probs, ids

    monkeypatch.setattr(Drafter, "likeliest", kept)
    return seen


def operations(engine: Engine, scores: list[Tensor]) -> _Operations:
    """Of one run of the draft loop with its verify, on a CPU."""
    scores.clear()
    with torch.inference_mode(), _Operations(scores) as watch:
        engine.runner._buckets[0].step._body()
    assert len(scores) == SHAPE["num_steps"] - 1
    return watch


def test_a_chain_compares_no_scores(make, scores):
    """Its scores are given to nothing but views: no cat, no gather; the general path joins and sorts them."""
    own = operations(make("off", graphs="on", **SHAPE), scores)
    assert own.of_scores <= VIEWS
    assert not SCORING & own.names.keys()
    with grown_as_trees():
        other = operations(make("off", graphs="on", **SHAPE), scores)
        assert other.of_scores - VIEWS
    assert other.names.keys() >= SCORING
    assert own.names["gather"] < other.names["gather"]
    assert own.names["cat"] < other.names["cat"]
    assert own.names.total() < other.names.total()


@pytest.fixture(params=["chain", "general"])
def profiled(request, make) -> Iterator[tuple[str, list[str]]]:
    """What the captured graph of a step on a GPU launches, with constants and without."""
    with grown_as_trees() if request.param == "general" else nullcontext():
        engine = make("off", graphs="on", device="cuda", dtype="float32", **SHAPE)
        yield request.param, launches(engine.runner._buckets[0].step._run)


@pytest.mark.gpu
def test_a_profile_of_a_chain_holds_no_scores(profiled):
    """In the captured graph too; index arrays are built by it, one for each forward."""
    way, names = profiled
    scoring = [name for name in names if any(word in name.lower() for word in SCORING)]
    assert bool(scoring) is (way == "general")
    assert sum("_index_rows" in name for name in names) == SHAPE["num_steps"]
