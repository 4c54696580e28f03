"""Known entries: what a probe stores in each slot, and what each query must then get.

A value is one-hot: the number of its slot, a block of dims at a time, and in the last dim a 1 that every entry has. So
the output of attention over them *is* the weight that each entry had, whatever softmax made of the scores. Scores
differ a little from entry to entry, so that a wrong scale of K shows, and heads of V by powers of two, so that a head
that is read for another shows. All these numbers are exact in every type from float32 to 8-bit floats with a scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = 4  # different ones
SPREAD = 1.5  # of the scores: the heaviest entry has exp(SPREAD) times the weight of the lightest
HEADS = 3  # powers of two by head, then from the first again


@dataclass(frozen=True)
class Known:
    """slots: all that a probe writes, by number; heads, kv_heads, dim: of the model; scale: that of its softmax."""

    slots: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    scale: float

    @property
    def block(self) -> int:
        """Slots that one pass tells apart."""
        return self.dim - 1

    @property
    def num_passes(self) -> int:
        return -(-len(self.slots) // self.block)

    def query(self, count: int) -> Tensor:
        """[count, heads, dim] float32: the same for all."""
        q = torch.zeros(count, self.heads, self.dim)
        q[..., 0] = 1 / self.scale
        return q

    def entries(self, slots: Sequence[int], number: int) -> tuple[Tensor, Tensor]:
        """K and V, [n, kv_heads, dim] float32, that pass `number` stores in these slots."""
        places = torch.tensor([self.slots.index(slot) for slot in slots])
        k = torch.zeros(len(slots), self.kv_heads, self.dim)
        k[..., 0] = self._scores(places)[:, None]
        v = torch.zeros(len(slots), self.kv_heads, self.dim)
        v[..., -1] = 1
        own = (places // self.block == number).nonzero().flatten()
        v[own, :, places[own] % self.block] = 1
        return k, v * self._amplitudes()[None, :, None]

    def weights(self, seen: Sequence[Sequence[int]]) -> Tensor:
        """[n, slots] float64: what each entry weighs for a query that sees these slots."""
        weights = torch.zeros(len(seen), len(self.slots), dtype=torch.float64)
        for row, slots in enumerate(seen):
            places = torch.tensor([self.slots.index(slot) for slot in slots])
            weights[row, places] = torch.softmax(self._scores(places).double(), 0)
        return weights

    def read(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Of the outputs of all passes, [n, heads, dim]: weights [n, heads, slots], and their sum [n, heads], float64.

        The sum is 1 where only entries of the probe were read.
        """
        own = self._amplitudes().double().repeat_interleave(self.heads // self.kv_heads)[None, :, None]
        scaled = [output.double().cpu() / own for output in outputs]
        weights = torch.cat([one[..., : self.block] for one in scaled], -1)[..., : len(self.slots)]
        return weights, scaled[0][..., -1]

    def scores(self, slots: Sequence[int]) -> list[float]:
        """Of these slots, for every query."""
        return [float(score) for score in self._scores(torch.tensor([self.slots.index(slot) for slot in slots]))]

    def of(self, chosen: Tensor) -> list[int]:
        """The slots of these places, [slots] bool."""
        return [self.slots[place] for place in chosen.nonzero().flatten().tolist()]

    def _scores(self, places: Tensor) -> Tensor:
        return (places * 7 % SCORES).float() * (SPREAD / (SCORES - 1))

    def _amplitudes(self) -> Tensor:
        return 2.0 ** (torch.arange(self.kv_heads) % HEADS)


def softmax_scale(dim: int) -> float:
    """What most models scale their scores by."""
    return 1 / math.sqrt(dim)
