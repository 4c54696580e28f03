"""Tokens a second of the whole engine on the embedded model: ``python -m kvcanary_tools.bench.embedded.engine``.

float32, held-out prompts, real acceptance; drafting and none, each without a canary and with the default one (raise,
rolling). The four take turns batch by batch, batch 1 and 8, PASSES times after a short one that warms up. On a GPU
steps are CUDA graphs, and drafts are chains, longer ones for a single request: what costs there is the number of
launches, and of rows. There both schedules run, and of each engine a profile counts the kernels of a step.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from kvcanary import CanaryConfig
from kvcanary_tools.bench.common import (
    NEW_TOKENS,
    NUM_THREADS,
    PROMPTS,
    Timing,
    events_to_stderr,
    machine,
    progress,
    ratios,
    run_pass,
    save,
)
from kvcanary_tools.bench.gpu.device import device as gpu
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

BATCH_SIZES = (1, 8)
PASSES = 3
WARM_TOKENS = 16
SETTINGS = {
    "cpu": {},
    "cuda": {"device": "cuda", "graphs": "on", "attention_backend": "triton"},
}
DRAFTING = {"cpu": {}, "cuda": {1: {"topk": 1, "num_steps": 8}, 8: {"topk": 1, "num_steps": 5}}}  # by batch size
MODES = {"off": "off", "on": "raise"}
SCHEDULES = {"cpu": ("sync",), "cuda": ("sync", "overlap")}


def main(device: str | None = None) -> None:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(NUM_THREADS)
    prompts = [excerpt.prompt for excerpt in load_excerpts()[:PROMPTS]]
    rows = [_one(size, schedule, prompts, device) for schedule in SCHEDULES[device] for size in BATCH_SIZES]
    result = {
        "what": "tokens a second from submission to the last token, embedded model; speedup: drafting over none",
        "machine": machine() | (gpu() if device == "cuda" else {}),
        "settings": SETTINGS[device],
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "passes": PASSES,
        "rows": rows,
    }
    save("gpu_engine" if device == "cuda" else "cpu_engine", result)
    print("schedule   batch   no drafting   drafting   accepted   speedup off / on      canary, none / drafting")
    for row in rows:
        speeds, cost = row["tokens_per_second"], row["canary"]
        faster = " / ".join(f"{ratio['median']:.2f}" for ratio in row["speedup"].values())
        costs = " / ".join(f"x{ratio['median']:.3f}" for ratio in cost.values())
        print(
            f"{row['schedule']:8s}   {row['batch']:5d}   {speeds['none']:11.0f}   {speeds['drafting']:8.0f}   ", end=""
        )
        print(f"{row['accepted_length']:8.2f}   {faster:>16s}      {costs}")


def _one(size: int, schedule: str, prompts: list[str], device: str) -> dict:
    started, settings = perf_counter(), SETTINGS[device] | {"schedule": schedule}
    if device == "cuda":
        settings = settings | {"graph_buckets": (size,)}
    drafts = {"none": {"draft": "none"}, "drafting": DRAFTING[device].get(size, {})}
    batches = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    engines = {
        f"{draft} {canary}": Engine(EngineConfig(prefix_cache=False, canary=CanaryConfig(mode=mode), **settings, **own))
        for draft, own in drafts.items()
        for canary, mode in MODES.items()
    }
    progress(f"{schedule}, batch {size}, engines after {perf_counter() - started:.0f} s")
    run_pass(engines, batches, WARM_TOKENS)  # kernels are compiled for lengths as they come
    progress(f"{schedule}, batch {size}, warm after {perf_counter() - started:.0f} s")
    passes = []
    for number in range(PASSES):
        passes.append(run_pass(engines, batches))
        progress(f"{schedule}, batch {size}, pass {number + 1} of {PASSES} after {perf_counter() - started:.0f} s")
    return {
        "schedule": schedule,
        "batch": size,
        "drafting": drafts["drafting"],
        "tokens_per_second": {draft: _speed(passes, f"{draft} off") for draft in drafts},
        "prefill_share": {draft: _prefill_share(passes, f"{draft} off") for draft in drafts},
        "tokens_per_second_canary": {draft: _speed(passes, f"{draft} on") for draft in drafts},
        "accepted_length": round(passes[0]["drafting off"].accepted_length, 3),
        "speedup": {canary: ratios(passes, f"none {canary}", f"drafting {canary}", _seconds) for canary in MODES},
        "speedup_steps": ratios(passes, "none off", "drafting off", _step_seconds),
        "canary": {draft: ratios(passes, f"{draft} on", f"{draft} off", _seconds) for draft in drafts},
        "canary_steps": {draft: ratios(passes, f"{draft} on", f"{draft} off", _step_seconds) for draft in drafts},
        "device_work": {name: _device_work(engine, batches[0]) for name, engine in engines.items()}
        if device == "cuda"
        else {},
        "certificates": {draft: engines[f"{draft} on"].canary.certificate() for draft in drafts},
    }


def _speed(passes: list[dict[str, Timing]], name: str) -> float:
    return round(median(timings[name].tokens / timings[name].seconds for timings in passes), 1)


def _prefill_share(passes: list[dict[str, Timing]], name: str) -> float:
    return round(median(timings[name].prefill_seconds / timings[name].seconds for timings in passes), 3)


def _seconds(timing: Timing) -> float:
    return timing.seconds


def _step_seconds(timing: Timing) -> float:
    return timing.step_seconds


def _device_work(engine: Engine, prompts: list[str]) -> dict:
    """Kernels and their time, a step: of one batch from submission to the last token, prefill among them."""
    steps = engine.metrics.num_steps
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    steps = engine.metrics.num_steps - steps
    kernels = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    microseconds = sum(event.device_time for event in kernels)
    return {"steps": steps, "kernels": round(len(kernels) / steps, 1), "microseconds": round(microseconds / steps, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SETTINGS), help="by default the GPU where there is one")
    events_to_stderr()
    main(parser.parse_args().device)
