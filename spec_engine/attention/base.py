"""What every attention backend is: opened once a forward, it stores K and V and attends, layer by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from spec_engine.core import ForwardBatch
from spec_engine.memory.pools.pool import KVPool

if TYPE_CHECKING:
    from kvcanary import SubstepCanary


#: Attends in one layer, of q, k and v as `KVAccess.attend`, and stores nothing.
Alone = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class OpenAttention(Protocol):
    """A backend: makes the `KVAccess` of one forward and plans its reads, once for all layers."""

    def __call__(
        self,
        pool: KVPool,
        batch: ForwardBatch,
        num_heads: int,
        indices: Tensor,
        slots: Tensor,
        substep: SubstepCanary | None,
    ) -> PoolAttention:
        """``indices`` and ``slots`` stand for those of the batch: a canary replaces what it refuses.

        num_heads: query heads of the model; substep: the canary's hooks of this forward, or None.
        """
        ...

    def alone(self, pool: KVPool, batch: ForwardBatch, num_heads: int) -> Alone | None:
        """What attends in a forward whose tokens see each other alone, before it is opened; None: nothing does."""
        ...


class PoolAttention(ABC):
    """A `KVAccess` whose stores go to the pool and to the canary; a backend says in `read` how it attends."""

    def __init__(
        self,
        pool: KVPool,
        batch: ForwardBatch,
        num_heads: int,
        indices: Tensor,
        slots: Tensor,
        substep: SubstepCanary | None,
    ) -> None:
        self.pool = pool
        self.slots = slots
        self.substep = substep
        self.kv_heads, self.head_dim = pool.kv.shape[-2:]
        self.fold = num_heads // self.kv_heads
        self.kv_indptr = batch.kv_indptr
        self.plan(batch, indices)

    @cached_property
    def bounds(self) -> list[int]:
        """Of rows in `indices`, as the canary has seen them: on a CUDA device the host waits for them."""
        return self.kv_indptr.tolist()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v ``[n, kv_heads, head_dim]`` and return the attention of q ``[n, heads, head_dim]``."""
        self.store(layer, k, v)
        return self.read(layer, q)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k, v ``[n, kv_heads, head_dim]`` into the pool."""
        self.pool.store(layer, self.slots, k, v, self.substep)

    @classmethod
    def alone(cls, pool: KVPool, batch: ForwardBatch, num_heads: int) -> Alone | None:
        """As `OpenAttention` has it; a backend that reads the pool in every forward has none."""
        return None

    @abstractmethod
    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        """What is the same in all layers."""

    @abstractmethod
    def read(self, layer: int, q: Tensor) -> Tensor:
        """The attention of q ``[n, heads, head_dim]`` over what the plan names."""


def row_groups(new_lens: tuple[int, ...]) -> list[tuple[range, slice]]:
    """Rows that run as one product, and their tokens: all where they have equally many, else each by itself."""
    ends = list(accumulate(new_lens))
    if min(new_lens) == max(new_lens):
        return [(range(len(new_lens)), slice(0, ends[-1]))]
    return [(range(row, row + 1), slice(end - new_lens[row], end)) for row, end in enumerate(ends)]
