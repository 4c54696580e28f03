"""Turns with and without the plug-in: what they say together, and how much of it is noise.

Equal requests make equal steps, so the same step of every turn is compared: a machine that is slow for a second slows
some steps of one turn, and a median over turns does not hear of it. How far resampled turns agree is the noise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

RESAMPLED = 400
Turns = Sequence[Sequence[float]]
Steps = Sequence[Sequence[tuple[float, float]]]


def agreement(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Share of equal tokens, and by request where the first different one stands."""
    differs = {}
    equal = total = 0
    for number, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        total += max(len(ours), len(theirs))
        same = [a == b for a, b in zip(ours, theirs, strict=False)]
        equal += sum(same)
        if False in same:
            differs[number] = same.index(False)
    return {"share": equal / max(total, 1), "first_different": differs}


def throughput(off: Turns, on: Turns) -> dict[str, Any]:
    """Of pairs, each the seconds of its turns: throughput with over without, and what turns without differ by."""
    ratios = [sum(ours) / sum(theirs) for ours, theirs in zip(off, on, strict=True)]
    return {
        "ratios": ratios,
        "throughput_ratio": sum(map(sum, off)) / sum(map(sum, on)),
        "fastest_runs_ratio": min(map(min, off)) / min(map(min, on)),
        "median_runs_ratio": median(s for runs in off for s in runs) / median(s for runs in on for s in runs),
        "off_over_off": [sum(runs[::2]) / sum(runs[1::2]) for runs in off],
    }


@contextmanager
def stepped(engine: Any) -> Iterator[list[tuple[float, float]]]:
    """Seconds of every `engine.step()` meanwhile, and those of them in which its thread had a processor."""
    step, spent = engine.step, []

    def timed() -> Any:
        start = time.perf_counter(), time.thread_time()
        try:
            return step()
        finally:
            spent.append((time.perf_counter() - start[0], time.thread_time() - start[1]))

    engine.step = timed
    try:
        yield spent
    finally:
        del engine.step


def by_step(off: Steps, on: Steps) -> dict[str, Any]:
    """Of turns without and with, each as `stepped` gave it: throughput with over without, from the median of each step.

    ratio:        in seconds; of the thread that steps alone, in `thread_ratio`
    range:        what nine of ten resamplings of the turns say, of the thread in `thread_range`
    tenths:       milliseconds of a step without and with, in each tenth of the steps: prompts come first, and bound by
                  the device, then by the host
    quiet_ratio:  from what one of ten turns stays below in each step, where others disturb least
    off_over_off: every other turn without over those between: what noise leaves of 1
    """
    counts = sorted({len(turn) for turn in (*off, *on)})
    result: dict[str, Any] = {"steps": counts, "turns": [len(off), len(on)]}
    if len(counts) > 1:  # the scheduler did not decide alike in all of them
        return result
    (without, without_own), (with_it, with_own) = (np.moveaxis(np.array(turns), 2, 0) for turns in (off, on))
    draw = np.random.default_rng(1)
    result |= {"ms": [1e3 * _seconds(turns) / counts[0] for turns in (without, with_it)]}
    result |= {"ratio": _ratio(without, with_it), "range": _range(without, with_it, draw)}
    result |= {"thread_ratio": _ratio(without_own, with_own), "thread_range": _range(without_own, with_own, draw)}
    result |= {"quiet_ratio": _ratio(without, with_it, 0.1), "tenths": _tenths(without, with_it)}
    return result | {"off_over_off": _ratio(without[::2], without[1::2]) if len(off) > 1 else None}


def _range(off: np.ndarray, on: np.ndarray, draw: np.random.Generator) -> list[float]:
    drawn = [_ratio(_drawn(off, draw), _drawn(on, draw)) for _ in range(RESAMPLED)]
    return np.quantile(drawn, (0.05, 0.95)).tolist()  # type: ignore[no-any-return]


def _tenths(off: np.ndarray, on: np.ndarray) -> list[list[float]]:
    medians = [np.array_split(1e3 * np.median(turns, axis=0), 10) for turns in (off, on)]
    return [[float(own.mean()) for own in pair] for pair in zip(*medians, strict=True) if len(pair[0])]


def _drawn(turns: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return turns[draw.integers(0, len(turns), len(turns))]


def _ratio(off: np.ndarray, on: np.ndarray, quantile: float = 0.5) -> float:
    return _seconds(off, quantile) / _seconds(on, quantile)


def _seconds(turns: np.ndarray, quantile: float = 0.5) -> float:
    """Of a turn, [turns, steps], each of whose steps takes what this share of the turns stays below in it."""
    return float(np.quantile(turns, quantile, axis=0).sum())
