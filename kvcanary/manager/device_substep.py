"""DeviceSubstep: a forward over a pool on a device that judges itself there, as a captured one does, but comes once.

Its buffers wait for it, or are made when it is opened. The host collects it behind the step, with all that was
launched.
"""

from __future__ import annotations

from array import array

from torch import Tensor

from kvcanary.captured.launch_group import LaunchGroup
from kvcanary.captured.one_shot import OneShotSubstep
from kvcanary.errors import ContradictionError
from kvcanary.ledger.requests import Batch
from kvcanary.manager.session import Session
from kvcanary.manager.substep import OPEN, ExpectedForwards, SubstepCanary
from kvcanary.pools.plans import ReadPlan, WritePlan
from kvcanary.records.state import PoolState


class DeviceSubstep(SubstepCanary):
    """Rows that are chains and no guesses, stored by `put`; any other forward is judged on the host, as on a CPU."""

    __slots__ = ("_run",)

    def __init__(self, session: Session, expected: ExpectedForwards, kind: str, index: int, pool: PoolState) -> None:
        super().__init__(session, expected, kind, index, pool)
        self._run: OneShotSubstep | None = None

    def _take(self, read: ReadPlan, write: WritePlan) -> tuple[Tensor, Tensor]:
        """What is refused is known to the device alone, and reported when the step is collected.

        A refused id is null slot 0 in the indices, and -1 in the slots, where `put` stores nothing.
        """
        if self._where[0] == "draft" or not is_chains(read, write):
            return super()._take(read, write)
        self._run = run = self._launch(read, write)
        run.open()
        return run.indices, run.slots

    def _launch(self, read: ReadPlan, write: WritePlan) -> OneShotSubstep:
        """As the `launch_group` of captured ones; waits for the device where the plan left `num_written` there."""
        session, checks, (kind, index, pool) = self._session, self._session.checks, self._where
        batch, num_written = Batch(self._requests_of(read)), read.num_written
        written = num_written.tolist() if isinstance(num_written, Tensor) else [num_written] * len(batch)
        if sum(written) != write.slots.shape[0]:
            raise ContradictionError(
                f"the rows write {sum(written)} entries, the write plan has {write.slots.shape[0]}"
            )
        checks.flush_before_launch()
        self._expected.opened((kind, index, pool.name), session.step)
        captured, entries = session.on_device(), array("q", written)
        run = captured.take_once(pool, (kind, index), read, write, batch, written)
        launch_group, reads = LaunchGroup([(run,)]), [read.indices.shape[0]]
        record = session.recorder.forwards.launched(launch_group, batch.names, entries, reads)
        captured.launch(launch_group, batch, session.step, entries, [0], record)
        if checks.is_full:
            checks.read_all([run], batch.requests, session.step)
        return run

    def put(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None, *extras: Tensor) -> bool:
        """As `SubstepCanary.put`; on the device all values are."""
        if self._run is None or self._phase != OPEN:
            return super().put(layer, slots, k, v, *extras)
        self._store(self._run, layer, slots, k, v, extras)
        return True

    def store(self, layer: int, k: Tensor, v: Tensor | None = None, *extras: Tensor) -> None:
        """As `SubstepCanary.store`; on the device the values are put into the pool too."""
        if self._run is None or self._phase != OPEN:
            super().store(layer, k, v, *extras)
        else:
            self._store(self._run, layer, self._run.slots, k, v, extras)

    def close(self) -> None:
        """The body has run."""
        if self._run is not None and self._phase == OPEN:
            self._run.close()
        super().close()

    def _store(
        self, run: OneShotSubstep, layer: int, slots: Tensor, k: Tensor, v: Tensor | None, extras: tuple[Tensor, ...]
    ) -> None:
        if layer in run.layers:
            self._session.recorder.forwards.stored_again(self._pool.name, layer)
        run.store(layer, k, v, *extras, slots=slots)


def is_chains(read: ReadPlan, write: WritePlan) -> bool:
    """Whether every row begins at position 0 and goes on in a line."""
    return write.parents is None and read.tree_mask is None and read.starts is None and read.rows_per_request == 1
