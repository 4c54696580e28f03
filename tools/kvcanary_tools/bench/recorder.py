"""What the flight recorder costs: ``python -m kvcanary_tools.bench.recorder``.

Every public function of the recorder is replaced by one that keeps its time, and over STEPS decode steps, which is as
many as the ring holds, that time is set against the median step, checkpoints of the ring included. On the CPU: the
embedded model with trees, batch 1 and 8, one thread, processor time, the prompts asked again until the steps are over.
On a GPU, where there is one, by the clock: captured steps of Llama-3-8B's shape, 64 requests of 4,096 tokens. Keeping
time costs time too, so the shares are upper bounds. The bytes are those that the ring counts, the most after any step.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from unittest.mock import patch

import torch

from kvcanary import CanaryConfig
from kvcanary.recorder import MOST_BYTES, Recorder
from kvcanary.recorder_captured import CapturedEvents
from kvcanary_tools.bench.common import machine, save
from kvcanary_tools.bench.gpu import device
from kvcanary_tools.bench.host_checks import Clock
from kvcanary_tools.bench.step import LLAMA_8B, fill, make_engine, random_decoder
from kvcanary_tools.bench.step import STEPS as ROUND_STEPS
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

WHAT = "time in the flight recorder / a decode step"
STEPS = 512
BATCH_SIZES = (1, 8)
GPU_BATCH = 64
ALLOWED_PERCENT = 1.0
ALLOWED_BYTES = MOST_BYTES


def main() -> None:
    rows = gpu_rows() if torch.cuda.is_available() else []
    rows += cpu_rows()
    print("model                       batch   step ms   recorder us   % of a median step      MB")
    for row in rows:
        share = f"{row['recorder_us']:11.1f}   {row['percent_of_median_step']:18.2f}   {row['bytes'] / 1e6:5.1f}"
        print(f"{row['model']:<26}  {row['batch']:5d}   {row['step_ms']:7.3f}   {share}")


def gpu_rows() -> list[dict]:
    rows = [{"model": "8B shape, captured steps"} | on_gpu(GPU_BATCH)]
    save("gpu_recorder", {"what": WHAT, "machine": machine() | device(), "rows": rows})
    return rows


def cpu_rows() -> list[dict]:
    torch.set_num_threads(1)
    rows = [{"model": "embedded, trees"} | on_cpu(batch) for batch in BATCH_SIZES]
    save("cpu_recorder", {"what": WHAT, "machine": machine(), "rows": rows})
    return rows


def on_cpu(batch: int, steps: int = STEPS) -> dict:
    """The embedded model with its EAGLE-3 head; prompts follow one another without a pause."""
    prompts = itertools.cycle(excerpt.prompt for excerpt in load_excerpts())
    params = SamplingParams(max_new_tokens=128, ignore_eos=True)
    with timed_recorder(time.process_time) as clock:
        engine = Engine(EngineConfig(prefix_cache=False, max_running_requests=batch, canary=CanaryConfig()))

        def fill_up() -> None:
            while len(engine.running) < batch:
                engine.submit(next(prompts), params)
                engine.step()

        return measure(engine, clock, steps, batch, fill_up)


def on_gpu(batch: int, steps: int = STEPS) -> dict:
    """Plain decode of random weights in one bucket, overlap schedule, the rolling check on."""
    with timed_recorder(time.perf_counter) as clock:
        rounds = -(-steps // ROUND_STEPS)
        engine = make_engine(batch, random_decoder(LLAMA_8B), CanaryConfig(mode="raise"), rounds)
        fill(engine, batch, rounds)
        return measure(engine, clock, steps, batch)


def measure(engine: Engine, clock: Clock, steps: int, batch: int, before: Callable[[], None] = lambda: None) -> dict:
    """Seconds in the recorder over those of the steps; what `before` runs is not timed."""
    wholes, recorders, most = [], [], 0
    for _ in range(steps):
        before()
        inside, started = clock.seconds, clock.now()
        engine.step()
        wholes.append(clock.now() - started)
        recorders.append(clock.seconds - inside)
        most = max(most, engine.canary.recorder.num_bytes)
    step, mean = median(wholes), sum(recorders) / steps
    return {
        "batch": batch,
        "steps": steps,
        "step_ms": round(1e3 * step, 4),
        "recorder_us": round(1e6 * mean, 2),
        "median_recorder_us": round(1e6 * median(recorders), 2),
        "percent_of_median_step": round(100 * mean / step, 3),
        "bytes": most,
    }


@contextmanager
def timed_recorder(now: Callable[[], float]) -> Iterator[Clock]:
    """Engines that are made inside have recorders under the clock."""
    clock = Clock(now)
    changed = [
        (owner, name, function)
        for owner in (Recorder, CapturedEvents)
        for name, function in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
    ]
    patches = [patch.object(owner, name, clock.around(function)) for owner, name, function in changed]
    for one in patches:
        one.start()
    try:
        yield clock
    finally:
        for one in patches:
            one.stop()


if __name__ == "__main__":
    main()
