"""Host time of the plug-in's hooks with cold caches: ``python -m kvcanary_tools.bench.vllm.hooks --out FILE``.

A hook that is called in a loop has its code and data in the caches; in a server it runs once a step, behind some
milliseconds of other work. So other work is done here between the steps, of Python and of torch, and the time of a step
is taken with the canary and without, over a runner that has no model. Steps in which every row goes on by one are told
apart from those in which requests come and go, and from those behind them, whose rows are others than before.

On a GPU the launches are those of a server, replays of captured graphs; on a CPU they are left out, and the record says
so. There a third runner has hooks that do the least that hooks can (`floor`).
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch

from kvcanary import CanaryConfig
from kvcanary.adapters.observed.launches import Launches
from kvcanary.adapters.vllm.runner_v2 import HandleV2
from kvcanary.records.graph_cache import Replays
from kvcanary_tools.bench.vllm.hooks.bare_runner import LAYERS, ROWS, BareRunner, BareWorker, outputs
from kvcanary_tools.bench.vllm.hooks.floor import floored

KINDS = ("quiet", "settling", "arriving")


def other_work(milliseconds: float) -> None:
    """What a server does between two hooks: objects, strings and numbers, and small operations of torch."""
    end = time.perf_counter() + milliseconds / 1000
    x = torch.randn(64, 64)
    while time.perf_counter() < end:
        made = [{"name": f"request-{n}", "tokens": list(range(n % 7, n % 7 + 9)), "rank": n * 0.5} for n in range(60)]
        read = json.loads(json.dumps(made))
        made.sort(key=lambda own: own["rank"])
        x = torch.softmax(x @ x.T + len(read), -1)


@contextmanager
def watched(worker: BareWorker, content: str) -> Iterator[HandleV2]:
    """A canary over a worker; on a CPU without what it launches."""
    with ExitStack() as stack:
        if worker.model_runner.device.type == "cpu":
            stack.enter_context(patch.object(Replays, "run", lambda self, key, launch: lambda: None))
            stack.enter_context(patch.object(Launches, "count_of", lambda self, step: 0))
        handle = HandleV2(worker, CanaryConfig(mode="log", content=content))
        try:
            yield handle
        finally:
            handle.detach()
        if handle.guard.stopped:  # its hooks did nothing from then on
            raise click.ClickException(f"the canary stopped: {handle.guard.stopped}")


def step_us(runner: BareRunner, output: Any) -> float:
    """What a step takes of the host. The device ends what it was given before tokens are asked for, as in a server,
    whose model takes it longer than the canary does.
    """
    start = time.perf_counter()
    runner.execute_model(output)
    sampled = runner.sample_tokens(None)
    launched = time.perf_counter() - start
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    sampled.get_output()
    return 1e6 * (launched + time.perf_counter() - start)


def timed(device: str, steps: int, every: int, rest_ms: float, content: str) -> list[dict[str, list[float]]]:
    """Microseconds of each step, by kind: with a canary, without one, and on a GPU with its launches alone.

    They take turns from step to step: machines are slower for seconds at a time than a hook takes altogether.
    """
    sides = 3 if device == "cuda" else 2
    workers, planned = [BareWorker(device) for _ in range(sides)], [outputs(7, every) for _ in range(sides)]
    spent: list[dict[str, list[float]]] = [defaultdict(list) for _ in workers]
    with ExitStack() as stack:
        handle = stack.enter_context(watched(workers[0], content))
        for worker in workers[2:]:
            stack.enter_context(floored())
            stack.enter_context(watched(worker, content))
        for _ in range(steps):
            for worker, own, told in zip(workers, spent, planned, strict=True):
                kind, output = next(told)
                other_work(rest_ms)
                own[kind].append(step_us(worker.model_runner, output))
        canary = handle.canary
        if canary is not None and canary.waits:
            raise click.ClickException(f"{canary.waits} steps waited for the device, which none of a server does")
        if canary is not None and int(canary.memory.total):  # their reports would be timed
            raise click.ClickException(f"of {canary.step} steps some were found wrong, of a sound runner")
    return [{kind: us[len(us) // 5 :] for kind, us in own.items()} for own in spent]  # the first ones capture


def hooks_us(with_it: list[float], without: list[float]) -> dict[str, float]:
    """Of one kind of step: what the canary adds to the median, and to the mean without the slowest twentieth."""
    middle = [sorted(own)[: -max(len(own) // 20, 1)] for own in (with_it, without)]
    return {
        "median_us": round(statistics.median(with_it) - statistics.median(without), 1),
        "mean_us": round(statistics.fmean(middle[0]) - statistics.fmean(middle[1]), 1),
        "step_with_us": round(statistics.median(with_it), 1),
        "step_without_us": round(statistics.median(without), 1),
        "steps": len(with_it),
    }


def measured(device: str, steps: int, every: int, rest_ms: float, content: str, rounds: int) -> dict[str, Any]:
    """Steps of all rounds, each with workers of its own: `hooks`, and on a GPU their `floor`, by kind of step."""
    gc.disable()
    sides: list[dict[str, list[float]]] = [defaultdict(list) for _ in range(3)]
    for _ in range(rounds):
        for own, spent in zip(sides, timed(device, steps, every, rest_ms, content), strict=False):
            for kind, us in spent.items():
                own[kind] += us
        gc.collect()
    watched_steps, bare, launching = sides
    found = {"hooks": {kind: hooks_us(watched_steps[kind], bare[kind]) for kind in KINDS}}
    return found | ({"floor": {kind: hooks_us(launching[kind], bare[kind]) for kind in KINDS}} if launching else {})


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Where the JSON goes.")
@click.option("--steps", default=300, help="Of each round.")
@click.option("--every", default=10, help="In one of so many steps a request ends and another comes.")
@click.option("--rest-ms", default=4.0, help="Other work between two steps; 0: hooks run hot.")
@click.option("--rounds", default=3)
@click.option("--content", default="rolling", help="What the canary compares.")
@click.option("--label", default="", help="What is measured, for the record.")
def main(out: Path | None, steps: int, every: int, rest_ms: float, rounds: int, content: str, label: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads: Callable[[int], None] = torch.set_num_threads
    threads(1)
    record = {
        "label": label,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}",
        "launches": device == "cuda",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": ROWS,
        "layers": LAYERS,
        "content": content,
        "rest_ms": rest_ms,
        **measured(device, steps, every, rest_ms, content, rounds),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if out is not None:
        known = json.loads(out.read_text()) if out.exists() else []
        out.write_text(json.dumps([*known, record], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
