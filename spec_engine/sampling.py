"""How one request is sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from spec_engine.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled, and where it ends.

    temperature 0 is greedy. top_k 0 keeps every token; top_p keeps the smallest set of that probability mass; min_p
    drops what is less likely than that share of the likeliest.
    repetition_penalty divides positive logits of tokens that stand in prompt or output and multiplies negative ones
    (Keskar et al. 2019, CTRL); presence_penalty is subtracted once, frequency_penalty as often as the token stands in
    the output. logit_bias, token id to bias, is added last.
    The coin of output position p depends on (seed, p) alone, so drafting does not change what is drawn.
    stop: strings that end the text, which are cut off; stop_token_ids: tokens that end it, like EOS.
    logprobs: None for none, else how many of the likeliest tokens are listed beside each chosen one.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._freeze()
        _require_whole("max_new_tokens", self.max_new_tokens, 1, "")
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be finite and not negative, got {self.temperature}")
        _require_whole("top_k", self.top_k, 0, " (all tokens)")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p must lie in [0, 1], got {self.min_p}")
        self._check_penalties()
        if not isinstance(self.seed, int):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")
        self._check_stops()
        if self.logprobs is not None:
            _require_whole("logprobs", self.logprobs, 0, " (the chosen token alone)")

    @property
    def is_penalised(self) -> bool:
        """Whether its tokens must be counted."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """ConfigError where a token id that is named lies outside of the model's vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            stray = [token for token in ids if not 0 <= token < vocab_size]
            if stray:
                raise ConfigError(f"{name} names token {stray[0]}, the vocabulary has tokens 0 to {vocab_size - 1}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ConfigError(f"logprobs must be at most the vocabulary's {vocab_size} tokens, got {self.logprobs}")

    def _freeze(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_penalties(self) -> None:
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ConfigError(f"repetition_penalty must be finite and above 0, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} must be finite, got {getattr(self, name)}")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or math.isnan(bias) or bias == math.inf:
                raise ConfigError(f"logit_bias must map token ids to finite numbers or -inf, got {token!r}: {bias}")

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop must hold strings of at least one character, got {text!r}")
        for token in self.stop_token_ids:
            if not isinstance(token, int) or token < 0:
                raise ConfigError(f"stop_token_ids must hold token ids, got {token!r}")


def _require_whole(name: str, value: int, least: int, meaning: str) -> None:
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be at least {least}{meaning}, got {value}")
