"""What the benchmarks of a GPU share: the device's description, and the most that anything reads there."""

from __future__ import annotations

import gc
from statistics import median

import torch

READ_BYTES = 2 << 30
REPETITIONS = 20


def device() -> dict:
    """The GPU and what compiles for it."""
    import triton

    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": triton.__version__}


def give_back() -> None:
    """The device's memory of engines that nobody has any more: those that come next must fit."""
    gc.collect()
    torch.cuda.empty_cache()


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
