"""Chains of the beginnings of rows, from their token ids: what a canary that is only watching takes for the truth."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary_kernels.record.chain import chain_scan_torch
from kvcanary_kernels.record.formulas import mix_of
from kvcanary_kernels.record.layout import POWER_BITS, Identity, Keys, chain_root, signed

NOBODYS = Identity()
KEPT = 1 << 10  # chains of prefixes, since what is shared comes often


class Prefixes:
    """On the host, in microseconds: requests come and are resumed between two steps."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._kept: OrderedDict[tuple[Identity, bytes], int] = OrderedDict()
        self._powers = self._descending(1)
        self.root = lru_cache(KEPT)(self._root)  # chain of no token, by identity, as int64 tensors hold it

    def _root(self, identity: Identity = NOBODYS) -> int:
        return signed(chain_root(self.keys, "paged", *identity))

    def end(self, tokens: Sequence[int], identity: Identity = NOBODYS) -> int:
        """Chain of all these tokens, as int64 tensors hold it."""
        data = array("q", tokens).tobytes()
        held = self._kept.get((identity, data))
        if held is None:
            held = self._kept[identity, data] = self._end(np.frombuffer(data, dtype=np.uint64), self.root(identity))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return held

    def every(self, tokens: Sequence[int], identity: Identity = NOBODYS, after: Tensor | None = None) -> Tensor:
        """[n] int64: chain of every prefix of a row; `after`: the chains of what stands before these tokens, if any."""
        before = torch.empty(0, dtype=torch.int64) if after is None else after
        if not len(tokens):
            return before
        seed = before[-1:] if len(before) else torch.tensor([self.root(identity)])
        values = torch.tensor(tokens, dtype=torch.int64)
        out, positions = torch.empty_like(values), torch.arange(len(before), len(before) + len(values))
        chain_scan_torch(values, positions, torch.tensor([0, len(values)]), seed, keys=self.keys, out=out)
        return torch.cat((before, out))

    def _end(self, tokens: NDArray[np.uint64], root: int) -> int:
        """A^n root + the sum of A^(n - 1 - i) mix_i, A the multiplier."""
        n = len(tokens)
        if n >= len(self._powers):
            self._powers = self._descending(n)
        powers = self._powers[-n - 1 :]
        mixed = mix_of(tokens.view(np.int64), np.arange(n), signed(self.keys.mix_key)).view(np.uint64)
        return signed(int(np.dot(powers[1:], mixed)) + int(powers[0]) * root)

    def _descending(self, n: int) -> NDArray[np.uint64]:
        """More than n powers of the multiplier as uint64, the highest first."""
        low, high = self.keys.powers[0].numpy().view(np.uint64)
        return np.multiply.outer(high[: (n >> POWER_BITS) + 1], low).ravel()[::-1].copy()
