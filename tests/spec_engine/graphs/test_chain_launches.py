"""With topk 1 a captured drafting step compares no scores: what that saves is counted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from spec_engine import Engine
from spec_engine.drafting.drafter import Drafter

SHAPE = {"topk": 1, "num_steps": 4, "graph_buckets": [2], "max_running_requests": 2}
SCORING = ("topk", "sort", "softmax")


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch):
    """From now on chains are grown as trees of one branch are."""

    def use() -> None:
        monkeypatch.setattr(Drafter, "chain_constants", None)
        likeliest = Drafter._likeliest

        def by_scores(drafter: Drafter, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            _, ids = likeliest(drafter, logits)
            return torch.softmax(logits.float(), -1).topk(1, -1).values, ids

        monkeypatch.setattr(Drafter, "_likeliest", by_scores)

    return use


class _Operations(TorchDispatchMode):
    """Names of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def operations(engine: Engine) -> Counter[str]:
    """Of one run of the draft loop with its verify, on a CPU."""
    with torch.inference_mode(), _Operations() as watch:
        engine.runner._buckets[0].step._body()
    return watch.names


def test_a_chain_compares_no_scores(make, general):
    """No topk, no sort, no softmax, and fewer gathers and cats than the general path, which has all of them."""
    own = operations(make("off", graphs="on", **SHAPE))
    assert not {name for name in own if name.strip("_") in SCORING}
    general()
    other = operations(make("off", graphs="on", **SHAPE))
    assert set(SCORING) <= {name.strip("_") for name in other}
    assert own["gather"] < other["gather"]
    assert own["cat"] < other["cat"]
    assert own.total() < other.total()


def kernels(engine: Engine) -> tuple[Counter[str], float]:
    """Launches of one replay on a GPU by name, and microseconds of device time."""
    run = engine.runner._buckets[0].step._run
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counter(event.name for event in events), sum(event.time_range.elapsed_us() for event in events)


@pytest.mark.gpu
def test_a_profile_of_a_chain_holds_no_scores(make, general):
    """In the captured graph too."""
    settings = SHAPE | {"device": "cuda", "dtype": "float32"}
    own, own_us = kernels(make("off", graphs="on", **settings))
    general()
    other, other_us = kernels(make("off", graphs="on", **settings))
    print(f"chain {own.total()} launches {own_us:.0f} us, general {other.total()} launches {other_us:.0f} us")
    words = ("topk", "sort", "softmax")
    assert not [name for name in own if any(word in name.lower() for word in words)]
    assert [name for name in other if any(word in name.lower() for word in words)]
    assert own.total() < other.total()
