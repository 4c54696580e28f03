"""The token oracle: the token at a position of a request is a hash of the two, so every later token has a truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64, as int64


class TokenOracle:
    """What follows every prompt. Prompts that begin with the same token count as the same request.

    seed: another oracle; vocab_size: tokens lie in [0, vocab_size).
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        if vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, got {vocab_size}: a draft must be able to be wrong")
        self.vocab_size = vocab_size
        self._salt = int(_mix(torch.tensor(seed)))

    def tokens(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Tokens at `positions` of `requests` (their first prompt tokens), int64 of one shape; no host values."""
        mixed = _mix(_mix(requests + self._salt) + positions)
        return torch.remainder(mixed, self.vocab_size)

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow a prompt."""
        positions = torch.arange(len(prompt), len(prompt) + count)
        return self.tokens(torch.full_like(positions, prompt[0]), positions).tolist()

    def wrong(self, prompt: Sequence[int], first: int, tokens: Sequence[int]) -> list[int]:
        """Positions among [first, first + len(tokens)) at which a forward was fed another token than the true one."""
        end = first + len(tokens)
        truth = [*prompt, *self.continuation(prompt, max(end - len(prompt), 0))][first:end]
        return [first + i for i, (fed, true) in enumerate(zip(tokens, truth, strict=True)) if fed != true]


def _mix(x: Tensor) -> Tensor:
    """The SplitMix64 finaliser (Steele, Lea, Flood 2014); int64 products wrap as its uint64 ones do."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
