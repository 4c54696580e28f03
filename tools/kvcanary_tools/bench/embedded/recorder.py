"""What the flight recorder costs: ``python -m kvcanary_tools.bench.embedded.recorder``.

One engine with its canary takes turns of TURN decode steps: the recorder off, on, and on with a checkpoint among the
steps. The share is what the steps with it take more, the median over the rounds, and what a checkpoint adds, two of
them in a ring, with all that waits for it. On the CPU: the embedded model with trees, batch 1 and 8, one thread,
processor time, prompts asked again until the steps are over. On a GPU, where there is one, by the clock: captured
steps of Llama-3-8B's shape, 64 requests of 4,096 tokens, overlap schedule. The bytes are those that the ring counts,
the most after any of the steps that it may hold.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from statistics import median

import torch

from kvcanary import CanaryConfig
from kvcanary.recorder.recorder import MOST_BYTES
from kvcanary.recorder.segment import PARTS
from kvcanary_tools.bench.common import machine, save
from kvcanary_tools.bench.gpu.device import device
from kvcanary_tools.bench.gpu.step import LLAMA_8B, fill, make_engine, random_decoder
from kvcanary_tools.bench.gpu.step import STEPS as ROUND_STEPS
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

WHAT = "decode steps with the flight recorder over steps without it"
TURN = 8
ROUNDS = {1: 160, 8: 64, 64: 24}  # by requests in a step
BATCH_SIZES = (1, 8)
GPU_BATCH = 64
#: Turns, and the ring that the recorder has in them: one that is so short begins a segment behind the fifth step.
TURNS = {"off": 0, "on": 0, "checkpoint": PARTS * 5}
ALLOWED_PERCENT = 1.0
ALLOWED_BYTES = MOST_BYTES


def main() -> None:
    rows = gpu_rows() if torch.cuda.is_available() else []
    rows += cpu_rows()
    print("model                       batch   step ms   checkpoint ms   % of a median step, of it checkpoints      MB")
    for row in rows:
        shares = f"{row['percent_of_median_step']:18.2f}   {row['percent_of_checkpoints']:17.2f}"
        share = f"{row['checkpoint_ms']:13.2f}   {shares}   {row['bytes'] / 1e6:5.1f}"
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


def on_cpu(batch: int, rounds: int | None = None, ring: int | None = None) -> dict:
    """The embedded model with its EAGLE-3 head; prompts follow one another without a pause."""
    prompts = itertools.cycle(excerpt.prompt for excerpt in load_excerpts())
    params = SamplingParams(max_new_tokens=128, ignore_eos=True)
    engine = Engine(EngineConfig(prefix_cache=False, max_running_requests=batch, canary=CanaryConfig()))

    def fill_up() -> None:
        while len(engine.running) < batch:
            engine.submit(next(prompts), params)
            engine.step()

    return measure(engine, batch, rounds or ROUNDS[batch], time.process_time, fill_up, ring)


def on_gpu(batch: int) -> dict:
    """Plain decode of random weights in one bucket, the rolling check on."""
    config = CanaryConfig(mode="raise")
    prompts = -(-(len(TURNS) * TURN * ROUNDS[batch] + config.ring) // ROUND_STEPS)
    engine = make_engine(batch, random_decoder(LLAMA_8B), config, prompts)
    fill(engine, batch, prompts)
    return measure(engine, batch, ROUNDS[batch], time.perf_counter)


def measure(
    engine: Engine,
    batch: int,
    rounds: int,
    now: Callable[[], float],
    fill_up: Callable[[], None] = lambda: None,
    ring: int | None = None,
) -> dict:
    """`fill_up` runs before every step, and is not timed; `ring`: steps whose bytes are counted, by default its own."""
    recorder = engine.canary.recorder
    wait = torch.cuda.synchronize if engine.config.device == "cuda" else lambda: None

    def turn() -> float:
        """Seconds of TURN steps; the device has nothing to do before the first and after the last."""
        seconds = 0.0
        for _ in range(TURN):
            fill_up()
            started = now()
            engine.step()
            seconds += now() - started
        started = now()
        wait()
        return seconds + now() - started

    seconds: dict[str, list[float]] = {name: [] for name in TURNS}
    for number in range(rounds):
        for name in TURNS if number % 2 else reversed(TURNS):
            recorder.stop()
            recorder.steps = TURNS[name] or engine.config.canary.ring
            if name != "off":
                recorder.start(engine.canary.step)
            wait()
            seconds[name].append(turn())
    recorder.stop()
    recorder.steps, most = engine.config.canary.ring, 0
    recorder.start(engine.canary.step)
    for _ in range(ring or recorder.steps):
        fill_up()
        engine.step()
        most = max(most, recorder.num_bytes)
    step = median(seconds["off"]) / TURN
    share = median(a / b for a, b in zip(seconds["on"], seconds["off"], strict=True)) - 1
    checkpoint = max(0.0, median(a - b for a, b in zip(seconds["checkpoint"], seconds["on"], strict=True)))
    amortised = checkpoint * PARTS / recorder.steps / step
    return {
        "batch": batch,
        "rounds": rounds,
        "steps": TURN,
        "step_ms": round(1e3 * step, 4),
        "checkpoint_ms": round(1e3 * checkpoint, 3),
        "percent_of_checkpoints": round(100 * amortised, 3),
        "percent_of_median_step": round(100 * (share + amortised), 3),
        "bytes": most,
    }


if __name__ == "__main__":
    main()
