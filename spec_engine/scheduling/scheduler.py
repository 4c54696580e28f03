"""Who runs next: admission, chunked prefill first, then one decode step for everyone; retraction when pages run out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvcanary.faults import seam
from kvcanary.invariants import Pressure, check_running
from spec_engine.config import ConfigError
from spec_engine.memory.kv_memory import KVMemory
from spec_engine.memory.sizing import pages_for, step_pages, worst_case_step_pages
from spec_engine.request import Request
from spec_engine.scheduling.retraction import Retraction, new_token_ratio, plan_retraction
from spec_engine.scheduling.turns import Turns
from spec_engine.step.transfer import Ints

RATIO_DECAY = 1 / 600  # a step: what a retraction taught is forgotten in some hundreds of steps


@dataclass(frozen=True)
class Chunk:
    """Known tokens [start, end) of one request, to be forwarded together with other chunks."""

    request: Request
    start: int
    end: int

    @property
    def tokens(self) -> list[int]:
        return self.numbers.tolist()

    @property
    def numbers(self) -> Ints:
        """The same, [n] int64."""
        return self.request.numbers(self.start, self.end)

    @property
    def following(self) -> int:
        """The token after the chunk, where it is known."""
        return int(self.request.numbers(self.end, self.end + 1)[0])

    @property
    def is_first(self) -> bool:
        """Whether what lies before the chunk came from the prefix cache, or is nothing."""
        return self.start == self.request.cached_len

    @property
    def samples(self) -> bool:
        """Whether the token after the chunk is not known yet."""
        return self.end == self.request.num_tokens


class Scheduler:
    """Waiting and running requests.

    A request is admitted when the pool could hold it and every running request at the length that is expected of them:
    prompt plus a share of what they may still emit, ``least_ratio`` or more. With a ratio of 1 a running request never
    waits for pages; below it some are retracted when pages run out, and resume later with the same tokens.
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        reserve: int,
        ahead: int = 0,
        max_running: int,
        context_length: int,
        chunk_tokens: int,
        least_ratio: float,
        turns: Turns | None = None,
    ) -> None:
        """``turns``: where not all running requests fit on the device at once."""
        self.memory, self.reserve, self.ahead = memory, reserve, ahead
        self.page_size = memory.page_size
        self.max_running, self.context_length, self.chunk_tokens = max_running, context_length, chunk_tokens
        self._least_ratio = self._ratio = least_ratio
        self.turns = turns
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request behind those of its priority; ConfigError when it could never run."""
        prompt_len, new = request.prompt_len, request.params.max_new_tokens
        if not prompt_len:
            raise ConfigError("a prompt needs at least one token, got an empty one", "pass some text")
        if prompt_len + new > self.context_length:
            raise ConfigError(
                f"prompt of {prompt_len} tokens + max_new_tokens {new} = {prompt_len + new} exceeds the context length "
                f"{self.context_length}",
                "shorten the prompt or lower max_new_tokens",
            )
        for most, where, remedy in self._limits():
            if self.most_pages(request) > most:
                raise ConfigError(
                    f"prompt of {prompt_len} tokens + max_new_tokens {new} may need {self.most_pages(request)} pages "
                    f"of {self.page_size} slots, the {where} has {most}",
                    f"raise {remedy}",
                )
        behind = sum(other.priority >= request.priority for other in self.waiting)
        self.waiting.insert(behind, request)

    def _limits(self) -> Iterator[tuple[int, str, str]]:
        """Pages that one request may have at its longest, where, and the setting that says so."""
        yield self.memory.allocator.num_pages, "pool", "max_total_tokens"
        if self.turns is not None:
            yield self.turns.num_pages, "device", "max_device_tokens"

    def most_pages(self, request: Request) -> int:
        """Pages the request owns at its longest."""
        return pages_for(request.prompt_len + request.params.max_new_tokens, self.reserve, self.page_size)

    def admit(self) -> list[Request]:
        """Move waiting requests to running, first come first served, while rows and pages last."""
        admitted: list[Request] = []
        self._ratio = max(self._ratio - RATIO_DECAY, self._least_ratio)
        if not self.waiting:
            return admitted
        expected = [(request, self._expected_pages(request)) for request in self.running]
        while self.waiting and len(self.running) < self.max_running:
            expected.append((self.waiting[0], self._expected_pages(self.waiting[0])))
            if self.running and not self.memory.can_hold(expected, self.reserve):
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def turn(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of these running requests that the next forward may have: what all of them read fits on the device."""
        return requests if self.turns is None else self.turns.choose(requests, self._device_pages)

    def ran(self, requests: Sequence[Request]) -> None:
        """A forward of these was launched."""
        if self.turns is not None:
            self.turns.ran(requests)

    def _device_pages(self, request: Request) -> int:
        """Pages that its next forward needs on the device: all that it owns by then."""
        end = min(request.prefill_len, request.chunk_start + self.chunk_tokens)
        return max(pages_for(max(end, request.committed_len), self.reserve, self.page_size), len(request.pages))

    def next_chunks(self, requests: Sequence[Request]) -> list[Chunk]:
        """Chunks of these running requests' next prefill, at most ``chunk_tokens`` tokens; empty: time to decode."""
        chunks = []
        budget = self.chunk_tokens
        for request in requests:
            start = request.chunk_start
            if start < request.prefill_len and budget:
                end = min(request.prefill_len, start + budget)
                budget -= end - start
                chunks.append(Chunk(request, start, end))
        return chunks

    def pages_needed(self, requests: Sequence[Request]) -> int:
        """Pages that the next forward of these running requests takes beyond those that they own."""
        needed = self._pages_needed(self.turn(requests))
        return seam("bounds.unchecked_allocation", needed, available=lambda: self.memory.num_available)

    def _pages_needed(self, requests: Sequence[Request]) -> int:
        chunks = self.next_chunks(requests)
        if chunks:
            return sum(self._missing_pages(chunk.request, chunk.end, self.ahead) for chunk in chunks)
        return seam(
            "lengths.worst_case_estimate",
            self.decode_estimate(requests),
            worst_case=lambda: worst_case_step_pages(len(requests), self.reserve, self.page_size),
        )

    def decode_estimate(self, requests: Sequence[Request]) -> int:
        """Pages, to the last one, that a decode step of these requests takes."""
        return sum(self._missing_pages(request, request.committed_len, self.reserve) for request in requests)

    def pressure(self) -> Pressure:
        """Pages of the next forward, and what each of its requests needs."""
        requests = self.turn(self.running)
        ends = [(chunk.request, chunk.end, self.ahead) for chunk in self.next_chunks(requests)]
        ends = ends or [(request, request.committed_len, self.reserve) for request in requests]
        return Pressure(
            asked=self._pages_needed(requests),
            available=self.memory.num_available,
            quarantined=self.memory.cache.accounting(self.running).quarantined,
            needs={request.request_id: self._missing_pages(request, *end) for request, *end in ends},
        )

    def expected_pages(self, requests: Iterable[Request]) -> dict[str, int]:
        """By request, pages that admission counts with."""
        return {request.request_id: self._expected_pages(request) for request in requests}

    def _missing_pages(self, request: Request, end: int, reserve: int) -> int:
        return step_pages(end, len(request.pages), reserve, self.page_size)

    def retract(self) -> Retraction[Request]:
        """Choose running requests that give up their pages; they wait in front of all of their priority."""
        plan = plan_retraction(self.running, self._fits)
        for request in plan.retracted:
            self.send_back(request)
        if plan.kept:
            output_lens = [request.output_len for request in plan.kept]
            ratio = new_token_ratio(output_lens, [request.params.max_new_tokens for request in plan.kept])
            self._ratio = max(self._ratio, ratio)
        return plan

    def send_back(self, request: Request) -> None:
        """A running request waits again, in front of all of its priority."""
        self.running.remove(request)
        self.put_in_front(request)

    def put_in_front(self, request: Request) -> None:
        """It waits, in front of all of its priority."""
        self.waiting.insert(sum(other.priority > request.priority for other in self.waiting), request)

    def _fits(self, kept: Sequence[Request], retracted: Sequence[Request]) -> bool:
        return self.pages_needed(kept) <= self.memory.num_available + self.memory.cache.num_released_by(retracted)

    def finish(self, request: Request) -> None:
        check_running(request.request_id, request in self.running, len(self.running))
        self.running.remove(request)

    def _expected_pages(self, request: Request) -> int:
        """Pages it is expected to own at its end; what it owns already if that is more."""
        left = request.params.max_new_tokens - request.output_len
        length = request.prompt_len + request.output_len + int(self._ratio * left)
        return max(pages_for(length, self.reserve, self.page_size), len(request.pages))
