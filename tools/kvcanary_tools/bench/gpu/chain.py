"""What constants save the captured step of a chain: ``python -m kvcanary_tools.bench.gpu.chain``.

With topk 1 the tree is a chain, for which constants stand: no score is compared, sorted or gathered. The draft loop
with its verify, captured so, and captured as a tree of one branch: launches in the graph and microseconds of a replay.
The embedded model in float32, every row padding, so that what differs is what is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvcanary_tools.bench.common import machine, save
from kvcanary_tools.bench.gpu.device import device
from spec_engine import Engine, EngineConfig
from spec_engine.drafting.drafter import Drafter

BATCH_SIZES = (1, 8)
NUM_STEPS = 8
REPLAYS = 101


@contextmanager
def grown_as_trees() -> Iterator[None]:
    """Engines that are made within grow chains as they grow trees of one branch."""
    constants, likeliest = Drafter.chain_constants, Drafter._likeliest

    def by_scores(drafter: Drafter, logits: Tensor) -> tuple[Tensor, Tensor]:
        _, ids = likeliest(drafter, logits)
        return torch.softmax(logits.float(), -1).topk(1, -1).values, ids

    Drafter.chain_constants, Drafter._likeliest = None, by_scores  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Drafter.chain_constants, Drafter._likeliest = constants, likeliest  # type: ignore[method-assign]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.chain measures a CUDA device, and there is none here")
    rows = []
    for size in BATCH_SIZES:
        chain = _measured(size)
        with grown_as_trees():
            general = _measured(size)
        rows.append({"batch": size, "chain": chain, "general": general})
    result = {
        "what": f"the captured draft loop and verify of chains of {NUM_STEPS}: with constants, and as general trees",
        "machine": machine() | device(),
        "replays": REPLAYS,
        "rows": rows,
    }
    save("gpu_chain", result)
    print("batch   launches, constants / general   us, constants / general")
    for row in rows:
        launches, times = ([row[way][what] for way in ("chain", "general")] for what in ("launches", "us"))
        print(f"{row['batch']:5d}   {launches[0]:19d} / {launches[1]:7d}   {times[0]:13.0f} / {times[1]:7.0f}")


def _measured(size: int) -> dict:
    settings = {"device": "cuda", "dtype": "float32", "attention_backend": "triton", "max_running_requests": size}
    engine = Engine(EngineConfig(topk=1, num_steps=NUM_STEPS, graphs="on", graph_buckets=(size,), **settings))
    run = engine.runner._buckets[0].step._run
    return {"launches": len(launches(run)), "us": round(_replay_us(run), 1)}


def launches(run: Callable[[], object]) -> list[str]:
    """Names of what a replay launches."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def _replay_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


if __name__ == "__main__":
    main()
