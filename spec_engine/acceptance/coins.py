"""Seeded coins: what a coin shows depends on seed, position and purpose, and on nothing else.

Each position of an output is decided once, so a coin is never looked at twice for one purpose: restarts, other batches
and other trees show the same coins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

DRAW = "draw"  # picks a token of a distribution
DRAFT = "draft"  # picks a draft; a position that is drafted again, after a rejection before it, may show it again
ACCEPT = "accept"  # decides whether a drafted token stays
_BELOW_ONE = 1 - 2.0**-24  # stays below 1 in float32 too: a coin of 1 would lie beyond every token


def coins(seeds: Sequence[int], positions: Tensor, purpose: str) -> Tensor:
    """Uniform numbers in [0, 1): ``seeds [bs], positions [bs, M] int64 -> [bs, M] float64``.

    ``positions`` are those of the tokens to be decided. They are read on the host: within a captured graph, make the
    coins of every position that may come before, and gather.
    """
    shown = [_row(seed, own, purpose) for seed, own in zip(seeds, positions.tolist(), strict=True)]
    return torch.tensor(shown, dtype=torch.float64, device=positions.device).view(positions.shape)


def _row(seed: int, positions: list[int], purpose: str) -> list[float]:
    own = {position: _coin(seed, position, purpose) for position in set(positions)}
    return [own[position] for position in positions]


def _coin(seed: int, position: int, purpose: str) -> float:
    digest = hashlib.blake2b(f"{seed}:{position}:{purpose}".encode(), digest_size=8).digest()
    return min((int.from_bytes(digest, "little") >> 11) * 2.0**-53, _BELOW_ONE)
