"""What the host does for the canary in a captured step: ``python -m kvcanary_tools.bench.gpu.host_work``.

The model, requests and settings of `kvcanary_tools.bench.gpu.step`, and chains of 3 drafts and trees of 16 nodes as in
`kvcanary_tools.bench.gpu.drafted_step`, schedule overlap. Engines with and without a canary take turns, and every wait
for the device keeps the host's time: what is left of a step the host works. It is the mean over a round, for some steps
read bytes again and work more than the others, and the median of all rounds. What the canary adds is the median of the
differences within rounds, for a host is slower at times, over the time of a step without one; where half of all
differences lie says how sure that is, and a turn of an empty loop how fast the host was, for what is shared with others
is slower than another by a factor of two. In further rounds every call that the engine makes into its canary keeps time
too, and each moment counts once, for the innermost of them: what of the work lies within these calls, with what it
costs to keep time.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch

from kvcanary import CanaryManager
from kvcanary_tools.bench.common import machine, progress, save, settled
from kvcanary_tools.bench.gpu import drafted_step, step
from kvcanary_tools.bench.gpu.device import device, give_back
from kvcanary_tools.bench.gpu.fitting import fit
from spec_engine import Engine
from spec_engine.graphs.hooks import Together
from spec_engine.models.decoder import Decoder
from spec_engine.models.loader import Draft

CASES = (("none", 1), ("none", 64), ("chain", 1), ("chain", 16), ("tree", 1), ("tree", 16))  # drafts, requests
ROUNDS = {1: 36, 16: 30}  # by requests: the time of a shared host differs from round to round
FEWEST = 20
TURNS = 20_000  # of an empty loop
NAMES = ("off", "rolling")  # of the canaries
ENGINE, CANARY, WAIT = "engine", "canary", "wait"


class Shares:
    """Seconds of the host by who works: the innermost of the functions that keep them."""

    def __init__(self) -> None:
        self.seconds, self.calls = Counter[str](), Counter[str]()
        self._who: list[str] = []
        self._since = 0.0

    def around(self, who: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self.calls[who] += 1
            self._who.append(who)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._who.pop()

        return timed

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._who:
            self.seconds[self._who[-1]] += now - self._since
        self._since = now

    @contextmanager
    def kept(self, whose: Container[str], canary: CanaryManager | None) -> Iterator[None]:
        """By what waits for the device, and by all that an engine calls of its canary, if asked for."""
        with ExitStack() as stack:
            for owner, name, who in entries(canary):
                if who not in whose:
                    continue
                stack.enter_context(patch.object(owner, name, self.around(who, getattr(owner, name))))
            yield


def entries(canary: CanaryManager | None) -> list[tuple[object, str, str]]:
    """Owner, name and kind of every method that a step of an engine may call: of its canary, and those that wait."""
    public = [
        (owner, name, CANARY)
        for owner in ([] if canary is None else [canary, canary.async_tracker])
        for name, _ in inspect.getmembers(owner, inspect.isroutine)
        if not name.startswith("_")
    ]
    return [*public, (Together, "launch", CANARY), (torch.cuda.Event, "synchronize", WAIT)]


def main(cases: Sequence[tuple[str, int]] = CASES) -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.host_work measures a CUDA device, and there is none here")
    model = step.random_decoder(step.LLAMA_8B)
    head, rows = drafted_step.random_head(model), []
    for drafts, size in cases:
        rows.append(measure(drafts, size, model, head, ROUNDS.get(size, FEWEST)))
        tell(rows[-1])
        result = {
            "what": "microseconds of the host's work in a captured step (mean of a round, waits left out), what of it "
            "lies within calls of the canary, what a canary adds in percent of a step without one, and nanoseconds of "
            "a turn of an empty loop; "
            f"{step.PROMPT_LEN} tokens a request, Llama-3-8B's shape, bf16, overlap",
            "machine": machine() | device(),
            "steps": step.STEPS,
            "rows": rows,
        }
        save("gpu_host_work", result)


def tell(row: dict) -> None:
    low, high = row["added_half_us"]
    print(
        f"{row['drafts']} x {row['batch']}: the host works {row['work_us']['off']:.0f} us of {row['off_us']:.0f}, "
        f"with a canary {row['added_us']:+.0f} us (half of {row['rounds']} rounds: {low:+.0f} to {high:+.0f}): "
        f"{row['percent_of_step']:.2f} %; "
        f"{row['canary_us']:.0f} us in {row['calls']:.0f} calls",
        flush=True,
    )


def measure(drafts: str, size: int, model: Decoder, head: Draft, rounds: int, **settings: Any) -> dict:
    """A row of the table; ``settings``: of the engines, beside those of the drafts."""
    settings = drafted_step.DRAFTS.get(drafts, {}) | settings
    fits = fit(size, len(NAMES), drafted_step.slots_of(2 * rounds), model)
    size, engines = fits.requests, {}
    for name in NAMES:
        progress(f"{drafts} x {size}: prompts, canary {name}")
        engines[name] = _engine(name, size, model, None if drafts == "none" else head, rounds, settings)
    off, kept, turns, calls = list[float](), list[float](), list[float](), 0.0
    work: dict[str, list[float]] = {name: [] for name in NAMES}
    with settled():
        for _ in range(rounds):
            off.append(step.timed(engines["off"]))
            turns.append(_turn_seconds())
            for name in NAMES:
                work[name].append(_kept(engines[name], {WAIT})[0][ENGINE])
            own, calls = _kept(engines["rolling"], {WAIT, CANARY})
            kept.append(own[CANARY])
    work_us = {name: round(1e6 * median(seconds), 1) for name, seconds in work.items()}
    added = [after - before for before, after in zip(work["off"], work["rolling"], strict=True)]
    off_us, added_us = round(1e6 * median(off), 1), round(1e6 * median(added), 1)
    engines.clear()
    give_back()
    return {
        "drafts": drafts,
        "batch": size,
        **fits.as_dict(),
        "rounds": rounds,
        "off_us": off_us,
        "work_us": work_us,
        "added_us": added_us,
        "added_half_us": [round(1e6 * quarter, 1) for quarter in quantiles(added, n=4)[::2]],
        "percent_of_step": round(100 * added_us / off_us, 3),
        "canary_us": round(1e6 * median(kept), 1),
        "calls": round(calls, 1),
        "turn_ns": round(1e9 * median(turns), 1),
    }


def _turn_seconds() -> float:
    """Of an empty loop."""
    start = time.perf_counter()
    for _ in range(TURNS):
        pass
    return (time.perf_counter() - start) / TURNS


def _kept(engine: Engine, whose: Container[str]) -> tuple[dict[str, float], float]:
    """Of a step, in the mean of STEPS: seconds by who works, and calls of the canary, where these keep time."""
    shares = Shares()
    run = shares.around(ENGINE, engine.step)
    torch.cuda.synchronize()
    with shares.kept(whose, engine.canary):
        for _ in range(step.STEPS):
            run()
    return {who: spent / step.STEPS for who, spent in shares.seconds.items()}, shares.calls[CANARY] / step.STEPS


def _engine(name: str, size: int, model: Decoder, head: Draft | None, rounds: int, settings: dict[str, Any]) -> Engine:
    """Every request in decode, with room for what rounds of both kinds bring."""
    room = 2 * rounds
    if head is not None:
        settings = {"max_total_tokens": size * drafted_step.slots_of(room)} | settings
    engine = step.make_engine(size, model, step.CANARIES[name], room, head, **settings)
    step.fill(engine, size, room)
    return engine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=drafted_step.case, action="append", help="DRAFTSxREQUESTS: nonex64, chainx16")
    main(parser.parse_args().case or CASES)
