"""Bodies of requests, as OpenAI's clients send them, and the sampling parameters that they mean.

What a value may be beyond its type and OpenAI's own bounds is decided by SamplingParams.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from spec_engine.sampling import SamplingParams
from spec_engine.server.errors import RefusedError

MOST_SEQUENCES = 128  # of one request
MOST_LOGPROBS = 20
MOST_STOPS = 4
SEEDS = 2**63


def _encodable(text: str) -> str:
    """JSON can name half a surrogate pair, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be Unicode text, got a lone surrogate") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenIds = Annotated[list[int], Field(min_length=1)]
Stop = Annotated[Text, StringConstraints(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """include_usage: the last chunk of a stream says how many tokens there were."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(_Body):
    """What completions and chat have in common. The fields after `user` are this server's own.

    seed: sequence i of a request is drawn with seed + i; without one each request draws its own.
    """

    model: str
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    n: int | None = Field(1, ge=1, le=MOST_SEQUENCES)
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, logprobs: int | None) -> list[SamplingParams]:
        """One for each choice of a prompt. ConfigError where a value is no good."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        return [
            SamplingParams(
                max_new_tokens=max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k,
                top_p=1.0 if self.top_p is None else self.top_p,
                seed=seed + choice,
                ignore_eos=self.ignore_eos,
                stop_token_ids=tuple(self.stop_token_ids),
                stop=() if self.stop is None else self.stop if isinstance(self.stop, str) else tuple(self.stop),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logit_bias=_biases(self.logit_bias or {}),
                logprobs=logprobs,
            )
            for choice in range(self.num_choices)
        ]


class CompletionBody(Sampled):
    """``POST /v1/completions``. ``best_of`` must be n, `suffix` is refused: this engine completes, it does not fill."""

    prompt: (
        Text | TokenIds | Annotated[list[Text], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    )
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = False
    best_of: int | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts apart, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return self.prompt if isinstance(self.prompt[0], str | list) else [self.prompt]  # type: ignore[list-item,return-value]

    def check(self) -> None:
        if self.best_of not in (None, self.num_choices):
            raise RefusedError(400, f"best_of must be n = {self.num_choices}, got {self.best_of}", param="best_of")
        if self.echo and self.logprobs is not None:
            raise RefusedError(400, "echo comes without logprobs: prompts have none here", param="echo")


class TextPart(_Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class Message(_Body):
    """One turn; content is text alone."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    def for_template(self) -> dict[str, Any]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ResponseFormat(_Body):
    """Text, and nothing else."""

    type: Literal["text"]


class ChatBody(Sampled):
    """``POST /v1/chat/completions``, text in, text out."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RefusedError(400, "top_logprobs needs logprobs", param="top_logprobs")


def _biases(named: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in named.items()}
    except ValueError:
        raise RefusedError(400, "logit_bias maps token ids to numbers", param="logit_bias") from None
