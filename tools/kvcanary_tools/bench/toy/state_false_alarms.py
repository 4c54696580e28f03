"""Right traffic of recurrent states has no finding: ``python -m kvcanary_tools.bench.toy.state_false_alarms``.

Requests of an engine without a model: prefixes by hit or in chunks that end inside blocks, verifies of which any number
of drafts is accepted, rollbacks to an earlier column, states put away and brought back, preemption, padding, entries
that go from hand to hand. Mode ``raise``: the first finding ends the run with its report. A state check is a state that
a forward took, or that was copied, published or loaded, judged for identity and bytes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kvcanary import NO_STATE, CanaryConfig, CanaryManager, StateView
from kvcanary_tools.bench.common import events_to_stderr, machine, save

CHECKS, BLOCK, WIDTH, VOCAB = 10**6, 8, 4, 50
ENTRIES, MOST_RUNNING, MOST_CACHED = 480, 64, 24


@dataclass
class Row:
    """A request: its columns, of which `at` has its state, which has absorbed the first `length` of `tokens`."""

    name: str
    salt: str
    tokens: list[int]
    columns: list[int] = field(default_factory=list)
    at: int = 0
    length: int = 0
    away: Any = None

    @property
    def entry(self) -> int:
        return self.columns[self.at]


class Traffic:
    """An engine without a model, its canary, and what happens to it by chance."""

    def __init__(self, content: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.parts = {"conv": [torch.zeros(ENTRIES, 16)], "ssm": [torch.zeros(ENTRIES, 64, dtype=torch.bfloat16)]}
        self.manager = CanaryManager(CanaryConfig(content=content, seed=seed), [StateView("states", self.parts)])
        self.manager.arm()
        self.states = self.manager.states["states"]
        self.free = list(range(1, ENTRIES))
        self.rows: list[Row] = []
        self.cache: dict[tuple[object, ...], int] = {}
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """One step, and what lies around it."""
        self.manager.begin_step(self.manager.step + 1)
        if len(self.rows) < MOST_RUNNING:
            self._admit()
        for row in list(self.rows):
            if self.rng.random() < 0.02:
                self._end(row)
            elif row.away is not None:
                self._bring_back(row) if self.rng.random() < 0.3 else None
            elif self.rng.random() < 0.02 and row.length:
                self._put_away(row)
            elif self.rng.random() < 0.01:
                self._preempt(row)
        going = [row for row in self.rows if row.away is None and self.rng.random() < 0.9]
        self._prefill([row for row in going if row.length < len(row.tokens) - 1])
        ready = [row for row in going if row.length == len(row.tokens) - 1]
        half = len(ready) // 2
        self._verify(ready[:half])
        self._decode(ready[half:])
        self.manager.check()

    def _admit(self) -> None:
        tokens = [self.rng.randrange(2) for _ in range(3 * BLOCK)][: self.rng.randrange(2, 3 * BLOCK)]
        tokens = [7] * BLOCK + tokens if self.rng.random() < 0.8 else tokens
        row = Row(f"r{self.counts['requests']}", self.rng.choice(("", "", "tenant")), tokens)
        self.counts["requests"] += 1
        self.manager.admit(row.name, tokens, salt=row.salt)
        self._grant(row)
        self.rows.append(row)

    def _grant(self, row: Row) -> None:
        row.columns = [self._take() for _ in range(WIDTH)]
        row.at = row.length = 0
        self.states.on_alloc(row.name, row.columns)

    def _take(self) -> int:
        while len(self.free) < 8 or len(self.cache) > MOST_CACHED:
            entry = self.cache.pop(next(iter(self.cache)))
            self.states.on_free([entry])
            self.free.append(entry)
            self.counts["evictions"] += 1
        return self.free.pop(self.rng.randrange(len(self.free)))

    def _fill(self, entries: list[int]) -> None:
        for part in self.parts.values():
            part[0][entries] = torch.rand(len(entries), part[0].shape[1]).to(part[0].dtype)

    def _copy(self, source: int, entry: int) -> None:
        for part in self.parts.values():
            part[0][entry] = part[0][source]
        self.states.on_copy([source], [entry])

    # forwards

    def _forward(self, kind: str, rows: list[Row], counts: list[int]) -> None:
        if not rows:
            return
        padding, names = self.rng.randrange(3), [row.name for row in rows]
        sources = [row.entry if row.length else NO_STATE for row in rows]
        lengths, none = [row.length for row in rows], [None] * padding
        self.states.take(kind, names + none, sources + [0] * padding, lengths + [0] * padding)
        self._fill([row.columns[0] for row in rows] + [0] * padding)
        for row, count in zip(rows, counts, strict=True):
            row.at, row.length = 0, row.length + count
        after = [row.length for row in rows]
        self.states.leave(kind, names + none, [row.columns[0] for row in rows] + [0] * padding, after + [0] * padding)

    def _prefill(self, rows: list[Row]) -> None:
        for row in rows:
            self._hit(row) if not row.length else None
        rows = [row for row in rows if row.length < len(row.tokens) - 1]
        self._forward("prefill", rows, [self.rng.randint(1, len(row.tokens) - 1 - row.length) for row in rows])
        for row in rows:
            if not row.length % BLOCK:
                self._publish(row)

    def _hit(self, row: Row) -> None:
        ends = range((len(row.tokens) - 1) // BLOCK * BLOCK, 0, -BLOCK)
        end = next((end for end in ends if (row.salt, *row.tokens[:end]) in self.cache), 0)
        if end:
            self._copy(self.cache[(row.salt, *row.tokens[:end])], row.columns[0])
            row.length = end
            self.counts["hits"] += 1

    def _publish(self, row: Row) -> None:
        key = (row.salt, *row.tokens[: row.length])
        if key in self.cache:
            return
        entry = self._take()
        self.states.on_alloc(row.name, [entry])
        self._copy(row.entry, entry)
        self.states.on_share(row.name, [entry], [row.length])
        self.cache[key] = entry
        self.counts["publications"] += 1

    def _decode(self, rows: list[Row]) -> None:
        self._forward("decode", rows, [1] * len(rows))
        for row in rows:
            self._append(row, [self.rng.randrange(VOCAB)])

    def _verify(self, rows: list[Row]) -> None:
        """A chain of drafts behind the newest token; how many are accepted says from which column a row goes on."""
        if not rows:
            return
        drafts = [[row.tokens[-1], *self.rng.choices(range(VOCAB), k=WIDTH - 1)] for row in rows]
        self.states.take("verify", [row.name for row in rows], [row.entry for row in rows], [r.length for r in rows])
        self._fill([entry for row in rows for entry in row.columns])
        names = [row.name for row in rows for _ in row.columns]
        counts = [row.length + n + 1 for row in rows for n in range(WIDTH)]
        paths = [own[: n + 1] for own in drafts for n in range(WIDTH)]
        self.states.leave("verify", names, [entry for row in rows for entry in row.columns], counts, paths)
        for row, own in zip(rows, drafts, strict=True):
            row.at = self.rng.randrange(WIDTH)
            row.length += row.at + 1
            self._append(row, [*own[1 : row.at + 1], self.rng.randrange(VOCAB)])
            self.counts["rollbacks"] += row.at < WIDTH - 1

    def _append(self, row: Row, tokens: list[int]) -> None:
        self.manager.append(row.name, tokens)
        row.tokens += tokens
        self.manager.commit(row.name, row.length)

    # lifetimes

    def _end(self, row: Row) -> None:
        self.rows.remove(row)
        self.manager.release(row.name)
        if row.away is None:
            self._give_back(row)

    def _give_back(self, row: Row) -> None:
        self.states.on_free(row.columns)
        self.free += row.columns

    def _preempt(self, row: Row) -> None:
        """All is computed again."""
        self._give_back(row)
        self._grant(row)
        self.counts["preemptions"] += 1

    def _put_away(self, row: Row) -> None:
        row.away = (
            self.states.on_offload([row.entry]),
            [part[0][row.entry].clone() for part in self.parts.values()],
            row.length,
        )
        self._give_back(row)
        self.counts["offloads"] += 1

    def _bring_back(self, row: Row) -> None:
        snapshot, values, length = row.away
        self._grant(row)
        for part, value in zip(self.parts.values(), values, strict=True):
            part[0][row.entry] = value
        row.length, row.away = length, None
        self.states.on_load(row.name, [row.entry], [length], snapshot)


def measure(checks: int, seed: int = 0, workers: int = 1) -> dict[str, Any]:
    """Half of the checks under `full`, half under `rolling`; with two workers, both at once."""
    halves = [(content, checks // 2, seed) for content in ("full", "rolling")]
    if workers > 1:
        with ProcessPoolExecutor(workers, get_context("spawn"), initializer=events_to_stderr) as pool:
            phases = list(pool.map(run_phase, *zip(*halves, strict=True)))
    else:
        phases = [run_phase(*half) for half in halves]
    totals = {name: sum(phase[name] for phase in phases) for name in ("states_checked", "findings", "seconds")}
    about = {"what": "checks of recurrent states in right traffic", "machine": machine(), "seed": seed}
    return about | totals | {"phases": phases}


@torch.inference_mode()
def run_phase(content: str, checks: int, seed: int) -> dict[str, Any]:
    """One engine, until so many states are checked."""
    torch.set_num_threads(1)
    started, traffic = time.perf_counter(), Traffic(content, seed)
    coverage = traffic.manager.session.coverage
    while coverage.states_checked < checks:
        traffic.run()
    certificate = traffic.manager.certificate()
    kept = ("states_checked", "bytes_checked", "unchecked")
    return {
        "content": content,
        **{name: certificate[name] for name in kept},
        "findings": len(certificate["findings"]),
        "steps": traffic.manager.step,
        "seconds": round(time.perf_counter() - started, 1),
        **traffic.counts,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="count state checks of right traffic; any finding is an error")
    parser.add_argument("--checks", type=int, default=CHECKS, help="state checks to reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, help="where to write the result; results/state_false_alarms.json by default"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes, at most two")
    options = parser.parse_args(arguments)
    result = measure(options.checks, options.seed, options.workers)
    save("state_false_alarms", result, options.json)
    print(f"{result['states_checked']:,} state checks, {result['findings']} findings, {result['seconds']} s")


if __name__ == "__main__":
    events_to_stderr()
    main()
