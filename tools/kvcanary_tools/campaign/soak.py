"""Soak: random traffic on one engine after the other, faults at a stated rate, and a ledger of both sides.

An engine runs until its traffic ends; with a fault in it, until that is found and those whom it does not touch have
gone on to their end. Then the next one is drawn: settings, traffic, and whether and when a fault strikes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvcanary.faults.fault import READY, Fault
from kvcanary.faults.target import Setup
from kvcanary_tools.campaign.configurations import FULL, setup_for
from kvcanary_tools.campaign.engines import Bench
from kvcanary_tools.campaign.harness import EngineTarget
from kvcanary_tools.campaign.outcome.report import is_right
from kvcanary_tools.campaign.runs import Result, judged
from kvcanary_tools.campaign.traffic import CLEAN, FAULTY, Run, play, submit

STEPS = (20, 60)  # in which requests come
ARRIVES, CANCELLED = 0.3, 0.05  # chances of a step that one comes, that one is cancelled
SHORTEST = 4  # new tokens of a request
BATCHES = (1, 6)
PER_STEPS = 100  # steps to which a rate of faults refers


class Mixed:
    """Requests of any length that come, and are cancelled, whenever they like; from ``warm`` on all is calm."""

    def __init__(self, bench: Bench, setup: Setup, rng: random.Random, warm: int, steps: int) -> None:
        self.bench, self.setup, self.rng = bench, setup, rng
        self.warm, self.last, self.number = warm, min(warm, steps), 0

    def come(self, target: EngineTarget) -> None:
        running = target.running()
        if target.step > self.last:
            return
        if running and self.rng.random() < CANCELLED:
            target.cancel(self.rng.choice(list(running)).request_id)
        first = self.setup.batch if target.step == 1 else 0
        for _ in range(first or self.rng.random() < ARRIVES or not target.engine.has_work):
            # who is there when a fault strikes must still be there when it is found
            is_long = target.step + self.setup.new_tokens > self.warm
            new_tokens = self.setup.new_tokens if is_long else self.rng.randint(SHORTEST, self.setup.new_tokens)
            submit(self.bench, self.setup, self.rng, self.number, new_tokens)
            self.number += 1


@dataclass
class Soaked:
    """The ledger. injected, found: by fault; wrong: runs that did not end as they should."""

    injected: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    wrong: list[Result] = field(default_factory=list)
    engines: int = 0
    steps: int = 0
    tokens: int = 0

    @property
    def is_even(self) -> bool:
        """Everything injected was found, and nothing else."""
        return self.injected == self.found and not self.wrong

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {"fault": name, "injected": count, "found": self.found[name]}
            for name, count in sorted(self.injected.items())
        ]
        wrong = [{"fault": r.run.fault, "seed": r.run.seed, "config": r.run.config, "text": r.text} for r in self.wrong]
        counts = {"engines": self.engines, "steps": self.steps, "tokens": self.tokens}
        return counts | {"injected": self.injected.total(), "found": self.found.total(), "rows": rows, "wrong": wrong}


def to_soak(faults: Sequence[Fault]) -> list[Fault]:
    """Those that can be made, and must be found in any traffic."""
    return [fault for fault in faults if fault.state == READY and fault.is_seen and not fault.otherwise]


def soak(ledger: Soaked, faults: Sequence[Fault], rate: float, seed: int) -> Iterator[Soaked]:
    """The ledger after each engine, for ever. faults: of ``to_soak``; rate: in PER_STEPS engine steps, on average."""
    rng = random.Random(seed)
    for number in range(seed, 1 << 62):
        _run_one(ledger, faults, rate, rng, number)
        yield ledger


def _run_one(ledger: Soaked, faults: Sequence[Fault], rate: float, rng: random.Random, seed: int) -> None:
    fault, name, setup = _drawn(faults, rng)
    steps, warm = rng.randint(*STEPS), 1 + int(rng.expovariate(rate / PER_STEPS)) if rate else 1 << 62
    strikes = warm <= steps
    run = Run(fault.name if strikes else "", name, setup, seed, FAULTY if strikes else CLEAN, "abort", turn=seed)
    played = play(run, fault if strikes else None, traffic=partial(Mixed, warm=warm, steps=steps))
    result = judged(run, fault if strikes else None, played)
    ledger.engines += 1
    ledger.steps += played.num_steps
    ledger.tokens += sum(len(tokens) for _, _, tokens in played.left)
    if result.struck and strikes:
        ledger.injected[run.fault] += 1
        ledger.found[run.fault] += is_right(result)
    if not is_right(result):
        ledger.wrong.append(result)


def _drawn(faults: Sequence[Fault], rng: random.Random) -> tuple[Fault, str, Setup]:
    """A fault, and a configuration in which it applies; settings that it does not depend on are drawn too."""
    fault = rng.choice(list(faults))
    setups = {name: setup for name, base in FULL.items() if (setup := setup_for(fault, base)) is not None}
    name = rng.choice(list(setups))
    setup = setups[name]
    if "batch" not in fault.needs and setup.pages is None and setup.model == "random":
        drawn = replace(setup, batch=rng.randint(*BATCHES))
        setup = drawn if fault.applies(drawn) else setup
    return fault, name, setup
