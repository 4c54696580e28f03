"""One request from submission to its last token, and what the caller gets of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from spec_engine.sampling import SamplingParams
from spec_engine.step.transfer import Ints

if TYPE_CHECKING:
    from spec_engine.acceptance.logprobs import TokenLogProb
    from spec_engine.memory.cache.host_tier import HostBlock
    from spec_engine.memory.cache.prefix_tree import Node

REFUSED = "refused"  # finish reason of a prompt that could never run
HANDED_OVER = "handed_over"  # of one that another engine goes on with


@dataclass(eq=False)
class Request:
    """Prompt, output so far, and the KV it owns.

    tokens[0:committed_len] have K/V in the target pool, as far as the host knows: under schedule "overlap" the device
    may be one verify ahead. Past the prefill ``tokens[committed_len]`` is the bonus token: sampled, not yet forwarded.
    Pages cover row positions [0, len(pages) * P); the first ``num_shared`` are the prefix cache's too, up to ``node``.

    generations: of the pages, as they were when it took them.
    prefill_len: tokens to forward before drafting: the prompt, or when a retracted request resumes all but the bonus.
    cached_len: entries that the prefix cache had for it at its last admission, or the host.
    block: where what a retracted request had computed waits on the host, until it is back in its pages.
    salt, adapter: under which alone equal tokens are equal K and V.
    root: salt and adapter under which the prefix cache has its shared pages, and keeps the others.
    ran_at: step in which it ran last, by the count of `Turns`.
    hands_over: it ends where its first token is known, and leaves what it has computed to another engine.
    begins_anew: it was damaged and waits to be computed again; forwards that have its old row are none of its own.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    adapter: str = ""
    row: int = 0
    committed_len: int = 0
    prefill_len: int = 0
    cached_len: int = 0
    pages: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    num_shared: int = 0
    node: Node | None = None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    block: HostBlock | None = None
    ran_at: int = 0
    hands_over: bool = False
    begins_anew: bool = False

    def __post_init__(self) -> None:
        self._prompt = np.array(self.prompt_ids, np.int64)
        self.root = self.salt, self.adapter

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def numbers(self, start: int, end: int) -> Ints:
        """Tokens [start, end), [n] int64; those of a prompt are converted once, however many chunks it comes in."""
        prompt = self._prompt[start:end]
        if len(prompt) == end - start:
            return prompt
        output = self.output_ids[max(start - self.prompt_len, 0) : end - self.prompt_len]
        return np.concatenate((prompt, np.array(output, np.int64)))

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def output_len(self) -> int:
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.output_len

    @property
    def goes_on(self) -> bool:
        """Whether what a forward of it gave is still its own."""
        return self.finish_reason is None and not self.begins_anew

    @property
    def is_prefilled(self) -> bool:
        """Whether everything that is known but the bonus token has been forwarded."""
        return self.committed_len >= self.prefill_len

    @property
    def known_len(self) -> int:
        """Tokens that can be forwarded before drafting: all that are known, but a bonus token."""
        return self.prompt_len + max(self.output_len - 1, 0)

    @property
    def chunk_start(self) -> int:
        """Where its prefill goes on: behind what is committed, and what is to come back from the host before."""
        return self.committed_len if self.block is None else self.block.length

    def begin(self) -> None:
        """Admitted, for the first time or again: everything known is to be forwarded, but a bonus token."""
        self.committed_len = self.cached_len = 0
        self.prefill_len = self.known_len
        self.begins_anew = False


@dataclass(frozen=True)
class TokenEvent:
    """Tokens that left the engine in one step for one request.

    text: what they add to the request's text, which may lag behind the tokens; finish_reason: "stop", "length",
    "cancelled", "out_of_pages", "kv_corruption" or "handed_over" with the last event, else None; logprobs: one entry a
    token, where the request asks for them. A prompt that is refused has one event: finish_reason "refused", and
    ``error`` says why.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    logprobs: tuple[TokenLogProb, ...] | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Output:
    """A finished request, or a prompt that was refused: finish_reason "refused", and ``error`` says why.

    logprobs: one entry a token, where the request asks for them.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_len: int
    logprobs: tuple[TokenLogProb, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A prompt that could never run, and the sentence that says why."""

    request_id: str
    error: str

    @property
    def event(self) -> TokenEvent:
        return TokenEvent(self.request_id, (), "", REFUSED, error=self.error)

    @property
    def output(self) -> Output:
        return Output(self.request_id, "", (), REFUSED, 0, error=self.error)
