"""DeviceForwards: forwards that judge themselves on the device, captured ones and those that come once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvcanary.captured.accepted_tokens import CapturedAcceptance
from kvcanary.captured.launch_group import LaunchGroup
from kvcanary.captured.moves import CapturedMove
from kvcanary.captured.one_shot import OneShotSubstep
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.captured.step import CapturedStep
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.config import CanaryConfig
from kvcanary.errors import ContradictionError, HookOrderError
from kvcanary.ledger.ledger import Request
from kvcanary.ledger.requests import Batch
from kvcanary.ledger.row_truth import RowTruth
from kvcanary.manager.expected_forwards import Announced
from kvcanary.manager.lifecycle import Lifecycle
from kvcanary.manager.substep import SubstepCanary
from kvcanary.pools.plans import (
    ReadPlan,
    WritePlan,
)
from kvcanary.records.state import CanaryState, PoolState


class DeviceForwards(Lifecycle):
    """The part of CanaryManager that is told of a forward before it runs, and hears of it behind the step."""

    def __init__(self, config: CanaryConfig, state: CanaryState, holds_back: bool) -> None:
        super().__init__(config, state, holds_back)
        self._static: CapturedStep | None = None
        self._has_bank = False  # whether somebody asked for it, and so has padding that may be judged

    def expect(self, forwards: Sequence[Announced], request_ids: Sequence[str] = ()) -> None:
        """These run next, each given by its kind, index and pool, in this order, with rows of these requests.

        One that has not opened its hooks when the step is judged next, by `check` or `depart`, or by `check_forwards`
        where it runs behind those, is H1. Announce forwards where the engine decides on them and not where it opens
        their hooks, and no captured ones: these are counted on the device. PlanError for a kind or pool that there is
        not.
        """
        if not self.is_armed or not forwards:
            return
        self._log.append(("expect", *zip(*forwards, strict=True), tuple(request_ids)))
        self._expected.announce(forwards, self.step, request_ids)
        self._coverage.announced += len(forwards)

    @property
    def bank(self) -> SubstepRegistry:
        """Substeps over static buffers, for graphs: add them before `arm()`; `check()` reads what they found."""
        self._has_bank = True
        return self._on_device().bank

    def launch(
        self, substep: CapturedSubstep, request_ids: Sequence[str], written: Sequence[int], reads: int
    ) -> RowTruth:
        """A captured forward of these requests runs next, the live rows of its bucket in this order.

        written: by request, entries that each of its rows writes; reads: entries that all rows read. What is returned
        goes into the forward's buffers before it runs, one value for each row of a request.
        """
        return self.launch_all([substep], request_ids, written, [reads])

    def launch_all(
        self,
        substeps: Sequence[CapturedSubstep],
        request_ids: Sequence[str],
        written: Sequence[int] | None,
        reads: Sequence[int],
        acceptance: CapturedAcceptance | None = None,
    ) -> RowTruth:
        """The same for forwards of one kind and pool that run one behind the other: their truth is the same.

        written: of each of them; reads: by forward. Where the engine launches a step before it has told of the last one
        (`launch_accepted`), reads are those of the lengths that it has told, and written is None, with an `acceptance`.
        """
        static = self._static
        if static is None:
            raise HookOrderError(f"launch() needs substeps of this manager's bank, got {substeps[0]}")
        series = static.bank.series(substeps, acceptance=acceptance)
        if (written is None) != (acceptance is not None):
            raise _not_one_each(series, len(request_ids), reads, written)
        return RowTruth(self.launch_series(series, request_ids, written or (), reads), static.bank.now)

    def launch_series(
        self,
        series: LaunchGroup,
        request_ids: Sequence[str],
        written: Sequence[int],
        reads: Sequence[int],
        where: int = 0,
    ) -> array[int]:
        """`launch_all` of forwards that are launched in every step (`SubstepRegistry.series`), in parts.

        written: by part, and by request; none of a part that writes what is accepted. reads: by forward
        where: address of an address by part, of a place SPREAD (native/layout.py), to which its truth
               goes; 0: nowhere. It is what is returned, too, by part in the form that `RowTruth` takes
        """
        static = self._static
        if static is None:
            raise HookOrderError(f"launch_series() needs substeps of this manager's bank, got {series}")
        if self._open:
            raise self._not_closed("launch()")
        batch, checks = self._ledger.batches[tuple(request_ids)], self._checks
        if len(reads) != series.count or len(written) != series.num_told * batch.told[0]:
            raise _not_one_each(series, len(batch), reads, written)
        if static.num_unlanded > 1 and any(request.unlanded > 1 for request in batch.requests):  # truth goes on by one
            checks.land()
        entries = array("q", written)
        record = self.recorder.captured.launched(series, batch.names, entries, reads)
        checks.settle_before_launch()
        if checks.is_full:
            for part in series.parts:
                checks.read_all(part, batch.requests, self.step)
        return static.launch(series, batch, self.step, entries, reads, record, where)

    def launch_accepted(
        self, substep: CapturedSubstep, request_ids: Sequence[str], reads: int, acceptance: CapturedAcceptance
    ) -> RowTruth:
        """As `launch`, for a forward that writes the entries of what a captured step of these requests has accepted.

        Only the device knows how many. The canary's books go on by its word when the step is judged, before anything
        behind it is, and `append` and `commit` have to say the same when the engine has heard.
        """
        return self.launch_all([substep], request_ids, None, [reads], acceptance)

    def launch_move(self, move: CapturedMove) -> None:
        """A captured move runs next, behind the forwards that were launched before it."""
        if self._static is None:
            raise HookOrderError("launch_move() needs a move of this manager's bank, got one of another")
        record = self.recorder.captured.launched_move(self._static.bank.moves.index(move), move.pool.name)
        self._checks.publish_pages()
        self._static.launch_move(move, record)

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
        self._checks.settle_before_launch()
        static, batch, entries = self._on_device(), Batch(requests), array("q", written)
        self._expected.opened((*site, pool.name), self.step)
        run = static.take_once(pool, site, read, write, batch, written)
        series, reads = LaunchGroup([(run,)]), [read.indices.shape[0]]
        record = self.recorder.captured.launched(series, tuple(read.requests), entries, reads)
        static.launch(series, batch, self.step, entries, [0], record)
        if self._checks.is_full:
            self._checks.read_all([run], requests, self.step)
        self._open.append(substep)
        return run

    def _on_device(self) -> CapturedStep:
        if self._static is None:
            self._static = CapturedStep(self._state, self._ledger, self._coverage, self.recorder.captured)
            self._static.bank.compares_moves = self._checks.compares_moves
            self._static.bank.compares_reads = self._checks.is_full
            self._checks.static = self._static
        return self._static


def _not_one_each(
    series: LaunchGroup, num_requests: int, reads: Sequence[int], written: Sequence[int] | None
) -> ContradictionError:
    of_parts = f" in each of {series.num_told} parts" if series.num_told > 1 else ""
    given = None if written is None else len(written)
    return ContradictionError(
        f"reads and written must be a number for each of {len(series)} forwards and of {num_requests} requests"
        f"{of_parts}, no written where a step says what it accepts, got {len(reads)} and {given}: give one each"
    )
