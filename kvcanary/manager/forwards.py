"""Forwards: the hooks of model forwards, those that the host judges and those that judge themselves on the device."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from torch import Tensor

from kvcanary.calls.forward import Forward
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.captured.launch_group import LaunchGroup
from kvcanary.captured.moves import CapturedMove
from kvcanary.captured.one_shot import OneShotSubstep
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.captured.step import CapturedStep
from kvcanary.checks.admission import refuse
from kvcanary.errors import ContradictionError, HookOrderError, PlanError
from kvcanary.ledger.ledger import Request
from kvcanary.ledger.requests import Batch
from kvcanary.manager.device_substep import DeviceSubstep
from kvcanary.manager.expected_forwards import Announced
from kvcanary.manager.session import Session
from kvcanary.manager.substep import Refusal, SubstepCanary, WarmupSubstep
from kvcanary.pools.launch_site import SUBSTEP_KINDS
from kvcanary.pools.plans import (
    ReadPlan,
    WritePlan,
)
from kvcanary.records.state import PoolState

FollowPlan = Callable[[Refusal, tuple[str, int], str, ReadPlan, WritePlan], tuple[Tensor, Tensor] | None]


class Forwards:
    """The part of a manager that hands out hooks, and is told of what runs without the host."""

    def __init__(self, session: Session) -> None:
        self._session, self._checks, self._ledger = session, session.checks, session.ledger
        self.recorder, self._log = session.recorder, session.recorder.log
        self.follow: FollowPlan | None = None  # None: plans that cannot be are errors
        self._judges_there = session.state.judges_on_device
        self._captured: CapturedStep | None = None

    def arm(self) -> None:
        """No buffers are made from now on but for forwards that come once."""
        if self._judges_there:
            self._on_device()
        if self._captured is not None:
            self._captured.registry.arm()

    @property
    def step(self) -> int:
        """The number of the step that runs."""
        return self._session.step

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
        self._session.expected.announce(forwards, self._session.step, request_ids)
        self._session.coverage.announced += len(forwards)

    def forward(self, kind: str, index: int, pool: str, puts: bool = False) -> SubstepCanary | WarmupSubstep:
        """The hooks of the next forward; of one whose layers lie in pools of several groups, one substep a group.

        `puts`: every layer is offered to the substep's `put` before the engine stores it. On a GPU such a forward
        judges itself there, if its rows are chains: the host reads what it found with the captured ones, by `collect`.
        """
        if self._session.open and not all(
            substep.is_same_forward(kind, index, self._session.pool(pool)) for substep in self._session.open
        ):
            self._session.expect_closed(f"forward({kind!r})")
        if kind not in SUBSTEP_KINDS:
            raise PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {kind!r}")
        state = self._session.state.by_name.get(pool) or self._session.pool(pool)
        if not self._session.is_armed:
            return WarmupSubstep()
        return (DeviceSubstep if puts and self._judges_there else SubstepCanary)(self, kind, index, state)

    # called by these hooks

    def requests_of(self, request_ids: Sequence[str]) -> list[Request]:
        """Those of a forward that is judged by what the host knows now: all that was accepted for them, too."""
        requests = self._ledger.known(request_ids)
        if any(request.pending_acceptances for request in requests):
            self._checks.collect()
        return requests

    def opened(self, substep: SubstepCanary, forward: Forward) -> None:
        violations: Sequence[Violation | ViolationBatch] = ()
        if not forward.is_usable:
            violations = refuse(forward, self._ledger.pages, self._session.config.disable)
        is_announced = self._session.expected.opened((forward.kind, forward.index, forward.pool.name), forward.step)
        if not is_announced and forward.kind == "draft":
            violations = [*violations, *self._session.expected.left_out(forward)]
        self._checks.open(forward)
        self._session.open.append(substep)
        self.recorder.opened(forward)
        if violations:
            self.report_violations(violations)

    def refused_plan(
        self, substep: SubstepCanary, error: Refusal, read: ReadPlan, write: WritePlan
    ) -> tuple[Tensor, Tensor] | None:
        """The error in mode raise; else what a forward that nobody judges may use, None: open it again."""
        if self.follow is None:
            raise error
        safe = self.follow(error, substep.site, substep.pool_name, read, write)
        if safe is not None:
            self._session.expected.opened((*substep.site, substep.pool_name), self._session.step)
            self._session.open.append(substep)
        return safe

    def report_violations(self, violations: Sequence[Violation | ViolationBatch]) -> None:
        self._checks.report(violations)

    def closed(self, substep: SubstepCanary, pool: PoolState, is_judged: bool = True) -> None:
        if is_judged:
            self.recorder.closed(pool.name)
        self._session.open.remove(substep)

    # on the device

    @property
    def registry(self) -> SubstepRegistry:
        """Substeps over static buffers, for graphs: add them before `arm()`; `collect()` reads what they found."""
        self._session.has_registry = True
        return self._on_device().registry

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
        captured = self._captured
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
        record = self.recorder.captured.launched(launch_group, batch.names, entries, reads)
        checks.flush_before_launch()
        if checks.is_full:
            for part in launch_group.parts:
                checks.read_all(part, batch.requests, self._session.step)
        return captured.launch(launch_group, batch, self._session.step, entries, reads, record, where)

    def launch_move(self, move: CapturedMove) -> None:
        """A captured move runs next, behind the forwards that were launched before it."""
        if self._captured is None:
            raise HookOrderError("launch_move() needs a move of this manager's registry, got one of another")
        record = self.recorder.captured.launched_move(self._captured.registry.moves.index(move), move.pool.name)
        self._checks.publish_pages()
        self._captured.launch_move(move, record)

    def launch_eager(
        self,
        substep: SubstepCanary,
        site: tuple[str, int],
        pool: PoolState,
        read: ReadPlan,
        write: WritePlan,
        requests: list[Request],
        written: list[int],
    ) -> OneShotSubstep:
        """As `launch`, for a forward that comes once: what judges it."""
        self._checks.flush_before_launch()
        captured, batch, entries = self._on_device(), Batch(requests), array("q", written)
        self._session.expected.opened((*site, pool.name), self._session.step)
        run = captured.take_once(pool, site, read, write, batch, written)
        launch_group, reads = LaunchGroup([(run,)]), [read.indices.shape[0]]
        record = self.recorder.captured.launched(launch_group, tuple(read.requests), entries, reads)
        captured.launch(launch_group, batch, self._session.step, entries, [0], record)
        if self._checks.is_full:
            self._checks.read_all([run], requests, self._session.step)
        self._session.open.append(substep)
        return run

    def _on_device(self) -> CapturedStep:
        if self._captured is None:
            self._captured = CapturedStep(
                self._session.state, self._ledger, self._session.coverage, self.recorder.captured
            )
            self._captured.registry.compares_moves = self._checks.compares_moves
            self._captured.registry.compares_reads = self._checks.is_full
            self._checks.captured = self._captured
        return self._captured


def not_one_each(
    launch_group: LaunchGroup, num_requests: int, reads: Sequence[int], written: Sequence[int] | None
) -> ContradictionError:
    of_parts = f" in each of {launch_group.num_known} parts" if launch_group.num_known > 1 else ""
    given = None if written is None else len(written)
    return ContradictionError(
        f"reads and written must be a number for each of {len(launch_group)} forwards and of {num_requests} requests"
        f"{of_parts}, no written where a step says what it accepts, got {len(reads)} and {given}: give one each"
    )
