"""Forwards: the hooks of model forwards, those that the host judges and those that judge themselves on the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvcanary.captured.launch_group import LaunchGroup
from kvcanary.captured.moves import CapturedMove
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.errors import ContradictionError, HookOrderError
from kvcanary.manager.device_substep import DeviceSubstep
from kvcanary.manager.session import Session
from kvcanary.manager.substep import Announced, ExpectedForwards, SubstepCanary, WarmupSubstep, unknown_kind
from kvcanary.pools.launch_site import SUBSTEP_KINDS


class Forwards:
    """The part of a manager that hands out hooks, and is told of what runs without the host."""

    def __init__(self, session: Session) -> None:
        self._session, self._checks, self._ledger = session, session.checks, session.ledger
        self._recorder, self._log = session.recorder, session.recorder.log
        self._judges_there = session.state.judges_on_device
        self.expected = ExpectedForwards(session.state.by_name)

    # hooks

    def expect(self, forwards: Sequence[Announced], request_ids: Sequence[str] = ()) -> None:
        """These run next, each given by its kind, index and pool, in this order, with rows of these requests.

        One that has not opened its hooks when the step is judged next, by `end_step`, or by `check_forwards` where
        it runs behind that, is H1. Announce forwards where the engine decides on them and not where it opens
        their hooks, and no captured ones: these are counted on the device. PlanError for a kind or pool that there is
        not.
        """
        if not self._session.is_armed or not forwards:
            return
        self._log.append(("expect", *zip(*forwards, strict=True), tuple(request_ids)))
        self.expected.announce(forwards, self._session.step, request_ids)
        self._session.coverage.announced += len(forwards)

    def forward(self, kind: str, index: int, pool: str, puts: bool = False) -> SubstepCanary | WarmupSubstep:
        """The hooks of the next forward; of one whose layers lie in pools of several groups, one substep a group.

        `puts`: every layer is offered to the substep's `put` before the engine stores it. On a GPU such a forward
        judges itself there, if its rows are chains: the host reads what it found with the captured ones, by `collect`.
        """
        session = self._session
        if kind not in SUBSTEP_KINDS:
            raise unknown_kind(kind)
        state = session.state.by_name.get(pool) or session.pool(pool)
        for own_kind, own_index, other in session.open:
            if (own_kind, own_index) != (kind, index) or other.view.group == state.view.group:
                raise session.not_closed(f"forward({kind!r})")
        if not session.is_armed:
            return WarmupSubstep()
        if state.is_gone:
            raise HookOrderError(f"pool {pool!r} was cleared: call on_reallocated() before a forward uses it again")
        hooks = DeviceSubstep if puts and self._judges_there else SubstepCanary
        return hooks(session, self.expected, kind, index, state)

    # on the device

    @property
    def registry(self) -> SubstepRegistry:
        """Substeps over static buffers, for graphs: add them before `arm()`; `collect()` reads what they found."""
        self._session.has_registry = True
        return (self._checks.captured or self._session.on_device()).registry

    def launch_group(
        self,
        launch_group: LaunchGroup,
        request_ids: Sequence[str],
        written: Sequence[int],
        reads: Sequence[int],
        where: int = 0,
    ) -> array[int]:
        """`launch_all` of forwards that are launched in every step (`SubstepRegistry.launch_group`), in parts.

        written: by part, and by request; none of a part that writes what is accepted. reads: by forward
        where: address of an address by part, of a place SPREAD (native/layout.py), to which its truth
               goes; 0: nowhere. It is what is returned, too, by part in the form that `RowTruth` takes
        """
        captured = self._checks.captured
        if captured is None:
            raise HookOrderError(f"launch_group() needs substeps of this manager's registry, got {launch_group}")
        if self._session.open:
            raise self._session.not_closed("launch()")
        batch, checks = self._ledger.batches[tuple(request_ids)], self._checks
        if len(reads) != launch_group.count or len(written) != launch_group.num_known * batch.loop_arguments[0]:
            raise not_one_each(launch_group, len(batch), reads, written)
        # truth goes on by one
        if captured.num_pending_acceptances > 1 and any(request.pending_acceptances > 1 for request in batch.requests):
            checks.collect()
        entries = array("q", written)
        record = self._recorder.forwards.launched(launch_group, batch.names, entries, reads)
        checks.flush_before_launch()
        if checks.is_full:
            for part in launch_group.parts:
                checks.read_all(part, batch.requests, self._session.step)
        return captured.launch(launch_group, batch, self._session.step, entries, reads, record, where)

    def launch_move(self, move: CapturedMove) -> None:
        """A captured move runs next, behind the forwards that were launched before it."""
        captured = self._checks.captured
        if captured is None:
            raise HookOrderError("launch_move() needs a move of this manager's registry, got one of another")
        record = self._recorder.forwards.launched_move(captured.registry.moves.index(move), move.pool.name)
        self._checks.publish_pages()
        captured.launch_move(move, record)


def not_one_each(
    launch_group: LaunchGroup, num_requests: int, reads: Sequence[int], written: Sequence[int] | None
) -> ContradictionError:
    of_parts = f" in each of {launch_group.num_known} parts" if launch_group.num_known > 1 else ""
    given = None if written is None else len(written)
    return ContradictionError(
        f"reads and written must be a number for each of {len(launch_group)} forwards and of {num_requests} requests"
        f"{of_parts}, no written where a step says what it accepts, got {len(reads)} and {given}: give one each"
    )
