"""Two minutes for a bug report or a blog: ``kvcanary bench quick`` prints device, overhead and accuracy.

Overhead: on a GPU with room for it a captured decode step of Llama-3-8B's shape, as `kvcanary bench step` measures it,
in fewer rounds; elsewhere steps of the embedded model on the CPU, as `kvcanary bench overhead` does. Accuracy:
corruptions of a live pool that were found at their place, and findings in right traffic, for some seconds each, in the
toy engine on the CPU. Too short for a figure to lean on: the benchmarks that it takes its parts from are for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any

import torch

from kvcanary_tools.bench.common import machine, progress, save
from kvcanary_tools.bench.embedded import overhead
from kvcanary_tools.bench.gpu import step
from kvcanary_tools.bench.gpu.device import device, read_ceiling
from kvcanary_tools.bench.toy import false_alarms, misses
from spec_engine.models.embedded import load_excerpts

BATCHES = (1, 8)
ROUNDS = 3  # of 48 steps, on a GPU; passes on a CPU
PROMPTS, PROMPT_CHARACTERS, NEW_TOKENS = 8, 200, 16  # on a CPU
NEEDS = 40 << 30  # bytes of device memory for 8B weights and three engines
SECONDS = 20.0  # for each part of the accuracy
TRAFFIC = false_alarms.TOY_PHASES[1]  # rows of few bytes, all of them read again
CORRUPTIONS, SLOT_CHECKS = 30, 2_000  # in one go of it


def main() -> None:
    started, is_gpu = time.perf_counter(), has_room()
    rows = measure_on_gpu() if is_gpu else measure_on_cpu()
    result = {
        "what": "a short look at overhead and accuracy; canary on (raise, rolling) / off",
        "machine": machine() | (device() if is_gpu else {}),
        "model": "Llama-3-8B's shape, bf16" if is_gpu else "the embedded model, float32",
        "overhead": rows,
        "accuracy": accuracy(),
    }
    result["seconds"] = round(time.perf_counter() - started, 1)
    save("quick", result)
    print("\n".join(lines(result)))


def has_room() -> bool:
    """Whether there is a GPU on which the 8B model and its engines fit."""
    return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= NEEDS


def measure_on_gpu() -> list[dict[str, Any]]:
    """By batch, the ratio of a step with the rolling check to one without."""
    model, ceiling = step.random_decoder(step.LLAMA_8B), read_ceiling() / 1e12
    rows = [step.measure(size, model, ceiling, ROUNDS, places=1) for size in BATCHES]
    return [{"batch": row["batch"], "step": row["over_off"]["rolling"], "off_ms": row["off_ms"]} for row in rows]


def measure_on_cpu() -> list[dict[str, Any]]:
    """The same of the embedded model, whose steps take a fraction of the time of one that serves."""
    prompts = [excerpt.prompt[:PROMPT_CHARACTERS] for excerpt in load_excerpts()[:PROMPTS]]
    rows = [overhead.measure(size, prompts, ROUNDS, NEW_TOKENS) for size in BATCHES]
    return [{"batch": row["batch"], "step": row["steps"]} for row in rows]


@torch.inference_mode()
def accuracy() -> dict[str, int]:
    """Corruptions made and found; slot checks of right traffic and its findings, of which the first is an error."""
    progress(f"accuracy: {SECONDS:.0f} s of corruptions, {SECONDS:.0f} s of right traffic")
    made = found = checked = findings = 0
    for seed in _seeds():
        for (_, what), times in misses.corrupt_pool(torch.float32, CORRUPTIONS, seed).items():
            made, found = made + times * (what == "tried"), found + times * (what == "found")
    for seed in _seeds():
        sound = false_alarms.run_toy(TRAFFIC, SLOT_CHECKS, 0, seed)
        checked, findings = checked + sound["slots_checked"], findings + sound["findings"]
    return {"corruptions": made, "found": found, "slots_checked": checked, "findings": findings}


def _seeds() -> Iterator[int]:
    """One after another until the time is over; at least one."""
    end = time.perf_counter() + SECONDS
    return takewhile(lambda seed: seed == 0 or time.perf_counter() < end, count())


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def lines(result: dict[str, Any]) -> list[str]:
    """What is printed, to be pasted."""
    own, found = result["machine"], result["accuracy"]
    return [
        f"device    {own['device']}; torch {own['torch']}, python {own['python']}, kvcanary {own['kvcanary']}",
        *(
            f"overhead  {result['model']}, batch {row['batch']}: {percent(row['step']['median'])} a decode step "
            f"({percent(row['step']['min'])} to {percent(row['step']['max'])})"
            for row in result["overhead"]
        ),
        f"accuracy  {found['found']} of {found['corruptions']} corruptions found at their place, "
        f"{found['findings']} findings in {found['slots_checked']:,} slot checks of right traffic",
        f"measured  in {result['seconds']:.0f} s by kvcanary bench quick",
    ]


if __name__ == "__main__":
    main()
