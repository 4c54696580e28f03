"""Right traffic of which tokens do not say all: ``python -m kvcanary_tools.bench.toy.identity_false_alarms``.

Weights are replaced while requests run, as in reinforcement learning: those in flight go on as a mix that is meant, or
compute their rows again; some weights come back. Prompts share their text and have other images behind it, or the same
ones; adapters are loaded again with equal files. Mode ``raise``: the first finding ends the run with its report.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from kvcanary_tools.bench.common import events_to_stderr, machine, save
from kvcanary_tools.bench.toy.flavoured import PAGE, FlavouredEngine

UPDATES, PAGES, MOST_RUNNING, VOCAB = 1000, 256, 6, 97
TEXT = [(7 * n) % VOCAB for n in range(3 * PAGE)]


class Traffic:
    """An engine and what happens to it by chance."""

    def __init__(self, content: str, seed: int, **engine: Any) -> None:
        self.rng, self.counts = random.Random(seed), Counter[str]()
        self.engine = FlavouredEngine(PAGES, content=content, **engine)
        self.began: dict[str, int] = {}  # how many updates there were, by request that runs
        self.updates = 0

    def run(self) -> None:
        """Requests come, go on and end under the weights of now; then there are others."""
        for _ in range(self.rng.randint(2, 6)):
            if len(self.began) < MOST_RUNNING:
                self._start()
            if self.began:
                self.engine.decode()
            for name in [name for name in self.began if self.rng.random() < 0.25]:
                self._end(name)
        self._update()

    def _start(self) -> None:
        name, image = f"r{self.counts['requests']}", self.rng.choice(("", "cat", "dog"))
        start = self.rng.choice((0, PAGE, 2 * PAGE + 1))
        length = len(TEXT) + self.rng.randrange(1, 3 * PAGE)
        prompt = [*TEXT, *(self.rng.randrange(2) for _ in range(length - len(TEXT)))]
        spans = [(start, start + PAGE, image)] if image else []
        for position in range(start, start + PAGE) if image else ():
            prompt[position] = 0  # the same placeholder for all images
        self.engine.start(name, prompt, spans, self.rng.choice(("", "", "law")))
        self.began[name] = self.updates
        self.counts.update(requests=1, with_images=bool(image), hits=bool(self.engine.hits[name]))

    def _end(self, name: str) -> None:
        """Pages of a mix of weights are no hit for anybody."""
        is_mix = self.began.pop(name) < self.updates
        self.engine.end(name, shares=not is_mix)
        self.counts["ends_of_a_mix"] += is_mix

    def _update(self) -> None:
        if self.rng.random() < 0.1:
            self.engine.canary.on_adapter("law", "its files", keeps=True)
            self.counts["adapter_loads"] += 1
        again = [name for name in self.began if self.rng.random() < 0.3]
        before, kept = self.engine.version, [name for name in self.began if name not in again]
        version = before - 1 if before > 1 and self.rng.random() < 0.1 else self.counts["versions"] + 1
        self.counts["versions"] = max(self.counts["versions"], version)
        self.counts["versions_that_came_back"] += version < before
        self.updates += 1
        self.engine.update(kept, clears=self.rng.random() < 0.7, version=version)
        for name in again:
            self.engine.preempt(name)
            self.engine.prefill(name)
            self.began[name] = self.updates
        self.counts.update(updates=1, kept_in_flight=len(kept), computed_again=len(again))


@torch.inference_mode()
def run_phase(content: str, updates: int, seed: int) -> dict[str, Any]:
    """One engine."""
    torch.set_num_threads(1)
    started, traffic = time.perf_counter(), Traffic(content, seed)
    for _ in range(updates):
        traffic.run()
    certificate = traffic.engine.canary.certificate()
    return {
        "content": content,
        **{name: certificate[name] for name in ("slots_checked", "bytes_checked")},
        "findings": len(certificate["findings"]),
        "seconds": round(time.perf_counter() - started, 1),
        **traffic.counts,
    }


def measure(updates: int, seed: int = 0) -> dict[str, Any]:
    """Half of the updates under `full`, half under `rolling`."""
    phases = [run_phase(content, updates // 2, seed) for content in ("full", "rolling")]
    totals = {name: sum(phase[name] for phase in phases) for name in ("updates", "slots_checked", "findings")}
    about = {"what": "weights, adapters and images in right traffic", "machine": machine(), "seed": seed}
    return about | totals | {"phases": phases}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="replace weights under right traffic; any finding is an error")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of the weights to reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write; results/identity_false_alarms.json by default")
    options = parser.parse_args(arguments)
    result = measure(options.updates, options.seed)
    save("identity_false_alarms", result, options.json)
    print(f"{result['updates']:,} updates, {result['slots_checked']:,} entries, {result['findings']} findings")


if __name__ == "__main__":
    events_to_stderr()
    main()
