"""A dense stand-in for the paged pool, written apart from every one the package has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor


class PlainKV:
    """One sequence, kept whole in float64: token i attends everything stored up to and including itself.

    Or the last ``window`` of it, itself included, in ``window_layers``.
    """

    def __init__(self, window: int | None = None, window_layers: tuple[int, ...] = ()) -> None:
        self.windows = dict.fromkeys(window_layers, window)
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.double(), v.double()
        if layer in self.stored:
            old_k, old_v = self.stored[layer]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.stored[layer] = k, v
        before, group = len(k) - len(q), q.shape[1] // k.shape[1]
        rows = []
        for token in range(len(q)):
            end = before + token + 1
            seen = slice(max(0, end - self.windows.get(layer, end)), end)
            heads = []
            for head in range(q.shape[1]):
                keys, values = k[seen, head // group], v[seen, head // group]
                weights = (keys @ q[token, head].double() / math.sqrt(q.shape[2])).softmax(0)
                heads.append(weights @ values)
            rows.append(torch.stack(heads))
        return torch.stack(rows).to(q.dtype)


@pytest.fixture
def plain_kv() -> type[PlainKV]:
    return PlainKV
