"""Bodies of answers, whole and in chunks, as OpenAI's clients read them."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_engine.acceptance.logprobs import TokenLogProb
from spec_engine.models.tokenizer import UNFINISHED, Tokenizer
from spec_engine.request import TokenEvent

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class Usage:
    """Tokens of one request; prompts are counted once, however many choices they have."""

    prompt_tokens: int
    completion_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass
class Choice:
    """One sequence so far."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogProb] | None = None

    def add(self, event: TokenEvent) -> None:
        self.text += event.text
        self.finish_reason = event.finish_reason
        if self.logprobs is not None:
            self.logprobs += event.logprobs or ()


@dataclass(frozen=True)
class Completions:
    """The shapes of ``/v1/completions``."""

    model: str
    tokenizer: Tokenizer
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        return self._head() | {
            "choices": [self._choice(i, c.text, c.finish_reason, c.logprobs) for i, c in enumerate(choices)],
            "usage": usage.as_dict(),
        }

    def chunk(self, index: int, event: TokenEvent, offset: int) -> dict[str, Any]:
        """What one event adds to choice ``index``, whose text has ``offset`` characters already."""
        choice = self._choice(index, event.text, event.finish_reason, event.logprobs, offset)
        return self._head() | {"choices": [choice]}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """What comes before the first token."""
        return []

    def closing(self, usage: Usage) -> dict[str, Any]:
        return self._head() | {"choices": [], "usage": usage.as_dict()}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenLogProb] | None, offset: int = 0
    ) -> dict[str, Any]:
        listed = None if logprobs is None else self._logprobs(logprobs, offset)
        return {"index": index, "text": text, "logprobs": listed, "finish_reason": reason}

    def _logprobs(self, logprobs: Sequence[TokenLogProb], offset: int) -> dict[str, Any]:
        tokens = [self.tokenizer.decode([entry.token_id]) for entry in logprobs]
        offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
        tops = [{self.tokenizer.decode([token]): _finite(value) for token, value in entry.top} for entry in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


@dataclass(frozen=True)
class Chats(Completions):
    """The shapes of ``/v1/chat/completions``."""

    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")

    def chunk(self, index: int, event: TokenEvent, offset: int) -> dict[str, Any]:
        delta = {"content": event.text} if event.text or event.logprobs else {}
        listed = None if event.logprobs is None else self._logprobs(event.logprobs, offset)
        return self._delta(index, delta, event.finish_reason, listed)

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def closing(self, usage: Usage) -> dict[str, Any]:
        return self._head() | {"object": "chat.completion.chunk", "choices": [], "usage": usage.as_dict()}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "chat.completion", "created": self.created, "model": self.model}

    def _delta(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head() | {"object": "chat.completion.chunk", "choices": [choice]}

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenLogProb] | None, offset: int = 0
    ) -> dict[str, Any]:
        listed = None if logprobs is None else self._logprobs(logprobs, offset)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": listed, "finish_reason": reason}

    def _logprobs(self, logprobs: Sequence[TokenLogProb], offset: int) -> dict[str, Any]:
        return {
            "content": [
                self._token(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._token(token, value) for token, value in entry.top]}
                for entry in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token_id])
        # of a token that is a part of a character the tokenizer tells no bytes
        num_bytes = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": num_bytes}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
