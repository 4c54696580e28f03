"""Random traffic for one engine: bursts of requests that share prefixes, some of which are aborted."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcanary_tools.bench.vllm.cpu import CpuBench

PREFIXES, PREFIX_TOKENS = 8, (20, 130)  # shared ones, and how long they are
OWN_TOKENS, OUTPUT_TOKENS = (1, 200), (1, 120)  # with a prefix, 450 of the 512 that a request may have
BURST, PAUSE_S, MOST = (1, 12), 0.3, 40  # requests of a burst, mean time between two, and requests at once
RENEWED, REPEATED, ABORTED = 0.02, 0.1, 0.03  # of requests: a new prefix, a prompt again; of steps: an abort


class Traffic:
    """Requests that come and go by a seed; `step` is one step of the engine, between arrivals and aborts.

    running, waiting: requests that were aborted, by what they were when it happened
    """

    def __init__(self, bench: CpuBench, seed: int, vocabulary: int = 512) -> None:
        self._bench, self._draw, self._vocabulary = bench, random.Random(seed), vocabulary
        self._prefixes = [self._tokens(*PREFIX_TOKENS) for _ in range(PREFIXES)]
        self._last = self._prefixes[0]
        self._open: dict[str, str] = {}  # ids of unfinished requests by what the engine calls them
        self._next = 0.0
        self.requests = self.finished = self.running = self.waiting = 0

    def step(self) -> None:
        """One step of the engine."""
        engine = self._bench.llm.llm_engine
        if time.perf_counter() >= self._next or not self._open:
            self._arrive()
        if self._draw.random() < ABORTED:
            self._abort()
        for output in engine.step():
            if output.finished:
                self.finished += 1
                self._open.pop(output.request_id)

    def end(self) -> Iterator[None]:
        """The steps until nobody runs, without arrivals."""
        engine = self._bench.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                self.finished += output.finished
                self._open.pop(output.request_id, None) if output.finished else None
            yield

    def _tokens(self, fewest: int, most: int) -> list[int]:
        return [self._draw.randrange(3, self._vocabulary) for _ in range(self._draw.randint(fewest, most))]

    def _arrive(self) -> None:
        draw, engine = self._draw, self._bench.llm.llm_engine
        self._next = time.perf_counter() + draw.expovariate(1 / PAUSE_S)
        for _ in range(min(draw.randint(*BURST), MOST - len(self._open))):
            params = self._bench.sampling(
                temperature=draw.choice((0.0, 1.0)), max_tokens=draw.randint(*OUTPUT_TOKENS), ignore_eos=True,
                detokenize=False,
            )  # fmt: skip
            name = f"soak-{self.requests}"
            self._open[name] = engine.add_request(name, {"prompt_token_ids": self._prompt()}, params)
            self.requests += 1

    def _prompt(self) -> list[int]:
        draw = self._draw
        if draw.random() < REPEATED:
            return list(self._last)
        number = draw.randrange(PREFIXES)
        if draw.random() < RENEWED:
            self._prefixes[number] = self._tokens(*PREFIX_TOKENS)
        self._last = self._prefixes[number] + self._tokens(*OWN_TOKENS)
        return self._last

    def _abort(self) -> None:
        """Any request, or one of those that wait."""
        running = {request.request_id for request in self._bench.scheduler.running}
        waiting = [name for name, own in self._open.items() if own not in running]
        chosen = waiting if waiting and self._draw.random() < 0.5 else list(self._open)
        if chosen:
            name = self._draw.choice(chosen)
            is_running = self._open.pop(name) in running
            self.running, self.waiting = self.running + is_running, self.waiting + (not is_running)
            self._bench.llm.llm_engine.abort_request([name])
