"""What the benchmarks of a GPU share: the device's description, and the most that anything reads there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch

READ_BYTES = 2 << 30
REPETITIONS = 20
Result = TypeVar("Result")


def device() -> dict:
    """The GPU and what compiles for it."""
    import triton

    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": triton.__version__}


def give_back() -> None:
    """The device's memory of engines that nobody has any more: those that come next must fit."""
    gc.collect()
    torch.cuda.empty_cache()


def in_orders(names: Sequence[str], places: int, run: Callable[[list[str]], Result]) -> list[Result]:
    """What ``run`` gives of engines that it makes in an order, for so many orders: the first of one ends the next.

    Where an engine's pools lie in the device's memory moves its steps by half a percent, as long as it lives.
    """
    results = []
    for first in range(places):
        results.append(run([*names[first:], *names[:first]]))
        give_back()
    return results


def read_ceiling() -> float:
    """Bytes a second of summing READ_BYTES: the median, warm."""
    data = torch.ones(READ_BYTES // 4, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPETITIONS):
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return READ_BYTES / median(times)
