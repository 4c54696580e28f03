"""Which token follows: greedy, or drawn from the tempered, truncated distribution with a seeded coin."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_engine.config import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    temperature 0 is greedy. top_k 0 keeps every token; top_p keeps the smallest set of that probability mass.
    The coin of output position p depends on (seed, p) alone, so drafting does not change what is drawn.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be finite and not negative, got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (all tokens) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")


def sample(logits: Tensor, params: tuple[SamplingParams, ...], positions: Tensor) -> Tensor:
    """The token that follows each node: ``logits [bs, nodes, vocab], positions [bs, nodes] -> [bs, nodes] int64``.

    ``positions`` are those of the tokens to be drawn. Verification compares drafts with these draws, which keeps
    the target's distribution exactly: every node's draw is one from the target, whatever was drafted.
    """
    tokens = logits.argmax(-1)
    for b, request in enumerate(params):
        if request.temperature > 0:
            tokens[b] = _draw(logits[b], request, positions[b])
    return tokens


def _draw(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
    probs, ids = torch.softmax(logits.double() / params.temperature, -1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(-1) - probs
    keep = before < params.top_p
    if params.top_k:
        keep[:, params.top_k :] = False
    cumulative = (probs * keep).cumsum(-1)
    threshold = _coins(params.seed, positions) * cumulative[:, -1]
    choice = torch.searchsorted(cumulative, threshold[:, None], right=True)
    last_kept = keep.sum(-1, keepdim=True) - 1
    return ids.gather(-1, torch.minimum(choice, last_kept)).squeeze(-1)


def _coins(seed: int, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), one a position: 53 bits of blake2b over (seed, position)."""
    coins = [_coin(seed, position) for position in positions.tolist()]
    return torch.tensor(coins, dtype=torch.float64, device=positions.device)


def _coin(seed: int, position: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
