"""Right traffic has no finding: ``python -m kvcanary_tools.bench.toy.false_alarms``.

The engine on the embedded model (trees, chains, plain decode, chunked prefill, compaction) and the toy engine (the
same and forks, cancellation, preemption, pages of every size that go from hand to hand), mode ``raise``: the first
finding ends the run with its report. Slot checks are those of the certificates; a (slot, grant) is distinct where a
target forward has read that slot under a grant of its page for the first time.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcanary import CanaryConfig
from kvcanary_tools.bench.common import events_to_stderr, machine, progress, save
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.forwards import ToyShape
from kvcanary_tools.bench.toy.traffic import Load, Traffic
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

CHECKS, DISTINCT = 10**8, 10**6
REPORT_SECONDS = 10.0
ACTIONS_A_LOOK = 20


@dataclass(frozen=True)
class ToyPhase:
    """One toy engine and its load; `checks` and `distinct` are its shares of what the toy engines are asked for."""

    name: str
    checks: float
    distinct: float
    shape: ToyShape
    load: Load
    content: str = "rolling"


@dataclass(frozen=True)
class EnginePhase:
    """The engine on the embedded model with these settings, for its share of the engine's slot checks."""

    name: str
    checks: float
    settings: dict
    content: str = "rolling"


_LONG = Load(max_rows=16, prompt_lens=(256, 960), max_len=1024, max_chunk=512)
_SMALL = {"layers": 1, "heads": 1, "head_dim": 4}
TOY_PHASES = (
    ToyPhase("one slot a page", 0.01, 0.02, ToyShape(page_size=1, num_pages=700), Load(), "full"),
    ToyPhase("small rows", 0.01, 0.03, ToyShape(), Load(), "full"),
    ToyPhase("bfloat16", 0.02, 0.05, ToyShape(dtype=torch.bfloat16, topk=4, num_nodes=12, num_pages=200), Load()),
    ToyPhase("chains", 0.16, 0.3, ToyShape(**_SMALL, page_size=16, num_pages=1300, topk=1, num_nodes=4), _LONG),
    ToyPhase("long trees", 0.4, 0.3, ToyShape(**_SMALL, page_size=16, num_pages=1300, topk=4, num_nodes=8), _LONG),
    ToyPhase("all bytes", 0.4, 0.3, ToyShape(**_SMALL, page_size=64, num_pages=340, num_nodes=8), _LONG, "full"),
)
ENGINE_PHASES = (
    EnginePhase("tree, chunked prefill", 0.5, {"page_size": 4, "topk": 4, "num_steps": 3, "prefill_chunk_tokens": 48}),
    EnginePhase("chain, page size 1", 0.2, {"page_size": 1, "topk": 1, "num_steps": 3}, "full"),
    EnginePhase("tree, page size 16", 0.2, {"page_size": 16, "topk": 2, "num_steps": 5}, "full"),
    EnginePhase("no drafting", 0.1, {"draft": "none", "page_size": 4, "prefill_chunk_tokens": 64}),
)
ENGINE_SHARE = 0.05  # of all slot checks: a model computes for each of them


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="count slot checks of right traffic; any finding is an error")
    parser.add_argument("--checks", type=int, default=CHECKS, help="slot checks to reach, all phases together")
    parser.add_argument("--distinct", type=int, default=DISTINCT, help="different (slot, generation) to reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result; results/false_alarms.json by default")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.checks, options.distinct, options.seed)
    save("false_alarms", result, options.json)
    print(f"{'phase':32} {'slot checks':>12} {'distinct':>10} {'seconds':>8}  findings")
    for row in (*result["phases"], {"phase": "all", **result}):
        columns = f"{row['slots_checked']:12,} {row['distinct']:10,} {row['seconds']:8.1f}  {row['findings']}"
        print(f"{row['phase']:32} {columns}")


@torch.inference_mode()
def measure(checks: int, distinct: int, seed: int = 0) -> dict:
    """Run every phase until its share is reached; the totals and the split."""
    toy_checks = checks * (1 - ENGINE_SHARE)
    phases = [run_engine(phase, int(checks * ENGINE_SHARE * phase.checks), seed) for phase in ENGINE_PHASES]
    for phase in TOY_PHASES:
        phases.append(run_toy(phase, int(toy_checks * phase.checks), int(distinct * phase.distinct), seed))
    totals = {key: sum(phase[key] for phase in phases) for key in ("slots_checked", "distinct", "findings")}
    return {
        "what": "slot checks of right traffic, and what they found; distinct: different (slot, generation)",
        "machine": machine(),
        "seed": seed,
        **totals,
        "seconds": round(sum(phase["seconds"] for phase in phases), 1),
        "phases": phases,
    }


def run_toy(phase: ToyPhase, checks: int, distinct: int, seed: int) -> dict:
    """Toy traffic until so many slot checks and so many distinct slots are reached."""
    engine = ToyEngine(CanaryConfig(mode="raise", content=phase.content, seed=seed), phase.shape, seed)
    traffic = Traffic(engine, phase.load, seed)
    report = _Progress(f"toy, {phase.name}", checks)
    while (done := engine.canary.certificate()["slots_checked"]) < checks or engine.distinct < distinct:
        traffic.run(ACTIONS_A_LOOK)
        report.at(done, engine.distinct)
    traffic.end()
    return {
        **_row(report, engine.canary.certificate(), engine.distinct),
        "page_size": phase.shape.page_size,
        "topk": phase.shape.topk,
        "actions": dict(sorted({**traffic.counts, "copy_on_write": engine.num_copies}.items())),
    }


def run_engine(phase: EnginePhase, checks: int, seed: int) -> dict:
    """Random batches of held-out prompts until so many slot checks are reached."""
    rng, prompts = random.Random(seed), [excerpt.prompt for excerpt in load_excerpts()]
    engine = Engine(EngineConfig(canary=CanaryConfig(mode="raise", content=phase.content, seed=seed), **phase.settings))
    report, distinct, requests = _Progress(f"engine, {phase.name}", checks), 0, 0
    while (done := engine.canary.certificate()["slots_checked"]) < checks:
        batch = rng.sample(prompts, rng.randint(1, 8))
        outputs = engine.generate(batch, SamplingParams(max_new_tokens=rng.randint(2, 64), ignore_eos=True))
        distinct += sum(output.prompt_len + len(output.token_ids) - 1 for output in outputs)  # the last is never fed
        requests += len(outputs)
        report.at(done, distinct)
    row = _row(report, engine.canary.certificate(), distinct)
    return {**row, **phase.settings, "requests": requests}


def _row(report: _Progress, certificate: dict, distinct: int) -> dict:
    return {
        "phase": report.name,
        "slots_checked": certificate["slots_checked"],
        "distinct": distinct,
        "findings": len(certificate["findings"]),
        "seconds": round(time.perf_counter() - report.started, 1),
        "content": certificate["content"],
        "forwards": certificate["forwards"],
        "slots_sealed": certificate["slots_sealed"],
        "bytes_checked": certificate["bytes_checked"],
        "unchecked": certificate["unchecked"],
    }


class _Progress:
    """A line on stderr now and then."""

    def __init__(self, name: str, goal: int) -> None:
        self.name, self._goal = name, goal
        self.started = self._last = time.perf_counter()

    def at(self, done: int, distinct: int) -> None:
        if time.perf_counter() - self._last > REPORT_SECONDS:
            self._last = time.perf_counter()
            progress(f"{self.name}: {done:,} of {self._goal:,} slot checks, {distinct:,} distinct slots")


if __name__ == "__main__":
    events_to_stderr()
    main()
