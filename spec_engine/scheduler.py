"""Who runs next: admission, chunked prefill first, then one decode step for everyone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvcanary.invariants import check_running
from spec_engine.config import ConfigError
from spec_engine.memory.sizing import pages_for
from spec_engine.request import Request


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens [start, end) of one request, to be forwarded together with other chunks."""

    request: Request
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.request.prompt_len


class Scheduler:
    """Waiting and running requests.

    A request is admitted when the pool could hold it and every running request at their longest, so a running
    request never waits for pages.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, reserve: int, max_running: int, context_length: int, chunk_tokens: int
    ):
        self.num_pages, self.page_size, self.reserve = num_pages, page_size, reserve
        self.max_running, self.context_length, self.chunk_tokens = max_running, context_length, chunk_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request; ConfigError when it could never run."""
        prompt_len, new = request.prompt_len, request.params.max_new_tokens
        if not prompt_len:
            raise ConfigError("a prompt needs at least one token, got an empty one", "pass some text")
        if prompt_len + new > self.context_length:
            raise ConfigError(
                f"prompt of {prompt_len} tokens + max_new_tokens {new} = {prompt_len + new} exceeds the context length "
                f"{self.context_length}",
                "shorten the prompt or lower max_new_tokens",
            )
        if self.most_pages(request) > self.num_pages:
            raise ConfigError(
                f"prompt of {prompt_len} tokens + max_new_tokens {new} may need {self.most_pages(request)} pages of "
                f"{self.page_size} slots, the pool has {self.num_pages}",
                "raise max_total_tokens",
            )
        self.waiting.append(request)

    def most_pages(self, request: Request) -> int:
        """Pages the request owns at its longest."""
        return pages_for(request.prompt_len + request.params.max_new_tokens, self.reserve, self.page_size)

    def admit(self) -> list[Request]:
        """Move waiting requests to running, first come first served, while rows and pages last."""
        admitted = []
        taken = sum(self.most_pages(request) for request in self.running)
        while self.waiting and len(self.running) < self.max_running:
            taken += self.most_pages(self.waiting[0])
            if taken > self.num_pages:
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def next_chunks(self) -> list[Chunk]:
        """Prompt chunks of the next prefill forward, at most ``chunk_tokens`` tokens; empty: time to decode."""
        chunks = []
        budget = self.chunk_tokens
        for request in self.running:
            start = request.committed_len
            if start < request.prompt_len and budget:
                end = min(request.prompt_len, start + budget)
                budget -= end - start
                chunks.append(Chunk(request, start, end))
        return chunks

    def finish(self, request: Request) -> None:
        check_running(request.request_id, request in self.running, len(self.running))
        self.running.remove(request)
