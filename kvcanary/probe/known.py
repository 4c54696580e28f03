"""Known entries: what a probe stores in each slot, and what each query must then get.

A value is one-hot: the number of its slot, a block of dims at a time, and in the last dim a 1 that every entry has. So
the output of attention over them *is* the weight that each entry had, whatever softmax made of the scores. Scores
differ a little from entry to entry, so that a wrong scale of K shows, and heads of V by powers of two, so that a head
that is read for another shows. Those at the edge of a window weigh more the longer it is: that one of them is read, or
left out, shows however many there are. A first pass, the sketch, stores all blocks at once: what is wrong shows there
too, and the others say what it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SCORES = 4  # different ones
SPREAD = 1.5  # of the scores: the heaviest entry has exp(SPREAD) times the weight of the lightest
HEADS = 3  # powers of two by head, then from the first again
LOUDEST = 6  # so much more a score may be: with SPREAD it is a number that 8 bits hold exactly
SKETCH = -1  # number of the pass that stores all blocks
#: How far a weight may be off, by bytes of a number: what 8-bit and 16-bit numbers, and sums of them, are off.
NEAR = {1: 0.12, 2: 0.03, 4: 1e-3, 8: 1e-3}


@dataclass(frozen=True)
class Known:
    """slots: all that a probe writes, by number; heads, kv_heads, dim: of the model; scale: that of its softmax.

    edge: entries of the longest row, and its slots at the edge of a window
    """

    slots: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    scale: float
    edge: tuple[int, tuple[int, ...]] = 0, ()

    @cached_property
    def places(self) -> dict[int, int]:
        """The number of each slot."""
        return {slot: place for place, slot in enumerate(self.slots)}

    @cached_property
    def scores(self) -> Tensor:
        """[slots] float32, for every query."""
        scores = (torch.arange(len(self.slots)) * 7 % SCORES).float() * (SPREAD / (SCORES - 1))
        longest, edge = self.edge
        if edge:
            scores[[self.places[slot] for slot in edge]] += min(round(math.log(longest / len(edge))), LOUDEST)
        return scores

    @property
    def num_passes(self) -> int:
        """Those that tell all slots apart."""
        return -(-len(self.slots) // (self.dim - 1))

    def query(self, count: int) -> Tensor:
        """[count, heads, dim] float32: the same for all."""
        q = torch.zeros(count, self.heads, self.dim)
        q[..., 0] = 1 / self.scale
        return q

    def entries(self, slots: Sequence[int], number: int) -> tuple[Tensor, Tensor]:
        """K and V, [n, kv_heads, dim] float32, that pass `number` stores in these slots."""
        places = torch.tensor([self.places[slot] for slot in slots])
        k = torch.zeros(len(slots), self.kv_heads, self.dim)
        k[..., 0] = self.scores[places][:, None]
        return k, self.codes(number)[places][:, None] * self._amplitudes[None, :, None]

    def codes(self, number: int) -> Tensor:
        """[slots, dim] float32: V of each slot in this pass, for heads of amplitude 1."""
        places, block = torch.arange(len(self.slots)), self.dim - 1
        codes = torch.nn.functional.one_hot(places % block, self.dim).float()
        own = 1 + places // block % 4 / 4 if number == SKETCH else (places // block == number).float()
        codes *= own[:, None]
        codes[:, -1] = 1
        return codes

    def weights(self, seen: Sequence[Sequence[int]]) -> Tensor:
        """[n, slots] float64: what each entry weighs for a query that sees these slots."""
        mask = torch.zeros(len(seen), len(self.slots), dtype=torch.bool)
        rows = torch.tensor([row for row, slots in enumerate(seen) for _ in slots])
        mask[rows, torch.tensor([self.places[slot] for slots in seen for slot in slots])] = True
        return self.scores.double().expand(len(seen), -1).masked_fill(~mask, -torch.inf).softmax(-1)

    def plain(self, output: Tensor) -> Tensor:
        """[n, heads, dim] float64, as if every head of V had amplitude 1."""
        return output.double() / self._amplitudes.double().repeat_interleave(self.heads // self.kv_heads)[None, :, None]

    def read(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Of the outputs of all passes, [n, heads, dim]: weights [n, heads, slots], and their sum [n, heads], float64.

        The sum is 1 where only entries of the probe were read.
        """
        scaled = [self.plain(output) for output in outputs]
        return torch.cat([one[..., :-1] for one in scaled], -1)[..., : len(self.slots)], scaled[0][..., -1]

    def of(self, chosen: Tensor) -> list[int]:
        """The slots of these places, [slots] bool."""
        return [self.slots[place] for place in chosen.nonzero().flatten().tolist()]

    @cached_property
    def _amplitudes(self) -> Tensor:
        return 2.0 ** (torch.arange(self.kv_heads) % HEADS)


def softmax_scale(dim: int) -> float:
    """What most models scale their scores by."""
    return 1 / math.sqrt(dim)
