"""The two doors into a pool, with the canary at both: every forward of the engine is opened here.

With ``canary=None`` a forward costs one ``if`` more than an engine without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary import ReadPlan, WritePlan
from kvcanary.faults import seam
from kvcanary.invariants import check_index_lengths
from spec_engine.attention.backends import BACKENDS
from spec_engine.attention.deferred import DeferredAttention
from spec_engine.core import ForwardBatch, within_window
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.pools.slot_map import Mapped
from spec_engine.models.decoder import KVAccess

if TYPE_CHECKING:
    from kvcanary import Announced, CanaryManager, SubstepCanary, WarmupSubstep
    from spec_engine.attention.base import PoolAttention


class Forwards:
    """Opens forwards over one pool; ``num_heads`` are the query heads of the model that owns it.

    backend: name of what reads the pool; behind: whose map leads to the pool's slots, None: they are the full ones.
    before:  what is called before each forward is opened, `KVMemory.before_open`; None: nothing waits for it.
    defers:  whether a forward is opened while the device computes what comes before it reads the pool.
    """

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        canary: CanaryManager | None,
        backend: str = "torch",
        behind: Mapped | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.pool, self.behind, self.before = pool, behind, before
        self.defers = pool.kv.is_cuda
        self.num_heads = num_heads
        self.canary = canary
        self.backend = BACKENDS[backend]
        self.backend.check_pool(pool)
        self._attention = self.backend.load()

    def announced(self, kind: str, index: int = 0) -> list[Announced]:
        """What a forward of this kind must open, for `CanaryManager.expect`."""
        return [(kind, index, self.pool.name)]

    @contextmanager
    def open(self, batch: ForwardBatch) -> Iterator[KVAccess]:
        """The attention of one forward; the canary sees the very arrays that it reads and writes by."""
        check_arrays(batch, self.pool.name)
        if self.behind is not None and self.behind.window is not None:
            batch = within_window(batch, self.behind.window)
        opened, substep = self._opened(batch)
        if self.defers:
            attention = DeferredAttention(opened, self._attention.alone(self.pool, batch, self.num_heads))
            yield attention
            attention.finish()
        else:
            yield opened()
        if substep is not None:
            substep.close()

    def _opened(self, batch: ForwardBatch) -> tuple[Callable[[], PoolAttention], SubstepCanary | WarmupSubstep | None]:
        """What opens the attention of a forward, and the hooks that it opens first."""
        substep = None
        if self.canary is not None:
            substep = self.canary.forward(batch.kind, batch.index, self.pool.name, puts=True)

        def opened() -> PoolAttention:
            if self.before is not None:
                self.before()
            full = batch.kv_indices, batch.slots
            if substep is not None:
                full = substep.open(read_plan(batch), write_plan(batch))
            return self._attention(self.pool, batch, self.num_heads, *self._own(*full), substep)

        return opened, substep

    def move(self, source: Tensor, destination: Tensor, guesses: bool = False) -> None:
        """Copy rows within the pool, ``[n] int64`` slots; all sources are read first, records move with the bytes.

        guesses: entries that draft forwards of this step have written.
        """
        if self.canary is None:
            self.pool.move(*self._own(source, destination))
            return
        with self.canary.move(self.pool.name, source, destination, guesses=guesses):
            self.pool.move(*self._own(source, destination))

    def _own(self, *slots: Tensor) -> tuple[Tensor, ...]:
        """The pool's own slots of these full ones."""
        if self.behind is None:
            return slots
        num_slots, translate = self.pool.num_slots, self.behind.translate
        return tuple(seam("windows.untranslated", translate(one), full=one, num_slots=num_slots) for one in slots)


def check_arrays(batch: ForwardBatch, pool: str) -> None:
    """IndexLengthError unless the index arrays are as long as the lengths by which they are read."""
    name = f"{batch.kind}[{batch.index}] of pool {pool!r}"
    check_index_lengths(name, "kv_indices", batch.kv_indices.shape[0], batch.kv_lens)
    for array in ("slots", "tokens", "positions"):
        check_index_lengths(name, array, getattr(batch, array).shape[0], batch.new_lens)


def read_plan(batch: ForwardBatch) -> ReadPlan:
    """What attention reads, in the canary's words."""
    uniform = min(batch.new_lens) == max(batch.new_lens)
    return ReadPlan(
        indptr=batch.kv_indptr,
        indices=batch.kv_indices,
        requests=batch.requests,
        rows_per_request=batch.rows_per_request,
        prefix_lens=batch.prefix_lens,
        num_written=batch.new_lens[0] if uniform else torch.tensor(batch.new_lens),
        tree_mask=batch.tree_mask,
        starts=batch.starts,
    )


def write_plan(batch: ForwardBatch) -> WritePlan:
    """What the forward stores, in the canary's words."""
    return WritePlan(
        slots=batch.slots,
        tokens=batch.tokens,
        positions=batch.positions,
        parents=batch.parents,
        lineage=batch.lineage,
    )
