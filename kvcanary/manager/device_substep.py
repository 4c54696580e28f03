"""DeviceSubstep: a forward over a pool on a device that judges itself there, as a captured one does, but comes once.

Its buffers wait for it, or are made when it is opened. The host collects it behind the step, with all that was
launched.
"""

from __future__ import annotations

from torch import Tensor

from kvcanary.captured.one_shot import OneShotSubstep
from kvcanary.errors import ContradictionError, HookOrderError
from kvcanary.manager.substep import CLOSED, OPEN, Owner, SubstepCanary
from kvcanary.pools.plans import (
    ReadPlan,
    WritePlan,
)
from kvcanary.records.state import PoolState


class DeviceSubstep(SubstepCanary):
    """Rows that are chains and no guesses, stored by `put`; any other forward is judged on the host, as on a CPU."""

    __slots__ = ("_run", "_slots")

    def __init__(self, manager: Owner, kind: str, index: int, pool: PoolState) -> None:
        super().__init__(manager, kind, index, pool)
        self._run: OneShotSubstep | None = None

    def _take(self, read: ReadPlan, write: WritePlan) -> tuple[Tensor, Tensor]:
        """What is refused is known to the device alone, and reported when the step is collected.

        A refused id is null slot 0 in the indices, and -1 in the slots, where `put` stores nothing.
        """
        requests = self._manager.requests_of(read.requests)
        if self._kind == "draft" or not is_chains(read, write):
            return super()._take(read, write)
        written = counts_of(read)
        if sum(written) != write.slots.shape[0]:
            raise ContradictionError(
                f"the rows write {sum(written)} entries, the write plan has {write.slots.shape[0]}"
            )
        where = self._kind, self._index
        self._run = run = self._manager.launch_eager(self, where, self._pool, read, write, requests, written)
        run.open()
        self.put, self._slots = self._put, run.slots
        return run.indices, self._slots

    def store(self, layer: int, k: Tensor, v: Tensor | None = None, *extras: Tensor) -> None:
        """As `SubstepCanary.store`; on the device the values are put into the pool too."""
        if self._run is None:
            super().store(layer, k, v, *extras)
        else:
            self._store(layer, self._slots, k, v, extras)

    def close(self) -> None:
        """The body has run."""
        if self._run is None or self._phase != OPEN:
            super().close()
            return
        self._run.close()
        super().close()

    def _put(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None, *extras: Tensor) -> bool:
        self._store(layer, slots, k, v, extras)
        return True

    def _store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None, extras: tuple[Tensor, ...]) -> None:
        run = self._run
        if run is None or self._phase == CLOSED:
            raise HookOrderError(f"store(layer={layer}) belongs between open() and close(): {self} is {self._phase}")
        if layer in run.layers:
            self._manager.recorder.stored_again(self._pool.name, layer)
        run.store(layer, k, v, *extras, slots=slots)


def is_chains(read: ReadPlan, write: WritePlan) -> bool:
    """Whether every row begins at position 0 and goes on in a line."""
    return write.parents is None and read.tree_mask is None and read.starts is None and read.rows_per_request == 1


def counts_of(read: ReadPlan) -> list[int]:
    """By row, the entries that it writes; waits for the device where the plan left them there."""
    counts = read.num_written
    return counts.tolist() if isinstance(counts, Tensor) else [counts] * len(read.requests)
