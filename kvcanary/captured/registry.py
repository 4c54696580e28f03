"""SubstepRegistry: every captured substep, made before the canary is armed, found without allocation, read together."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.forward import Ints
from kvcanary.captured.accepted_tokens import AcceptedTokens, CapturedAcceptance, CapturedTruth
from kvcanary.captured.buffers import Batch, StaticBuffers
from kvcanary.captured.kernel_launches import HEADER, Settings, Shared
from kvcanary.captured.launch_group import Launch, Launched, LaunchGroup, Part, runs_of
from kvcanary.captured.moves import CapturedMove
from kvcanary.captured.one_shot import OneShotSubstep
from kvcanary.captured.readback import Amounts, CoverageGap, Readback, read_violations, rows_of
from kvcanary.captured.substep import HEADER_PART, CapturedSubstep
from kvcanary.errors import HookOrderError, PlanError
from kvcanary.native.layout import RUN
from kvcanary.pools.launch_site import site_name
from kvcanary.records.mailbox import Mailbox
from kvcanary.records.side_stream import SideStream
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.content.reads import ReadKeys, reads_fit
from kvcanary_kernels.judge.count import NUM_BITS
from kvcanary_kernels.judge.forward import ForwardPlan
from kvcanary_kernels.judge.plan import NO_CLAIM
from kvcanary_kernels.judge.settle import NUM_RUNS, RUN_READ, RUN_ROWS, RUN_WRITTEN
from kvcanary_kernels.record.layout import MASK_32

CAPACITY = 256  # substeps: kinds and indices times buckets


class PendingReadback(NamedTuple):
    """Headers of substeps on their way to the host, and what was planned since the last snapshot.

    headers:       by number of the substep, [HEADER] int64, None: as runs say; those not there have not run
    once:          substeps of forwards that came once, each with its header
    planned:       [substeps * NUM_RUNS] rows, entries and reads that were expected
    launches:      of numbered substeps, in their order
    structs:         of their runs, and of those that came once, [runs, RUN.size] (native/layout.py)
    """

    headers: dict[int, Ints] | None
    once: Sequence[tuple[OneShotSubstep, Ints]]
    planned: array[int]
    launches: Sequence[Launch]
    structs: array[int]


class SubstepRegistry:
    """One substep for each (pool, kind, index, bucket); a bucket is a number of rows.

    moves:  as they were added;  turn: how many steps have begun
    step:   [1] int64 (`kernel_launches.Shared`), where nobody names another;  now: what is to stand there
    table_rows:  of what steps accept; None: nobody asked for them
    max_pending_acceptances: steps of which the device can add what they have accepted
    compares_moves: whether what moves is read again where it arrives
    compares_reads: whether bytes are compared as attention reads them, where it can
    shared: what all substeps use, those of forwards that come once too
    publish: makes true on the device what has happened to pages; before a forward runs. Without a ledger nothing has
    """

    def __init__(self, state: CanaryState) -> None:
        device = state.records.device
        self._state, self.turn, self.now = state, 0, 0
        self._reads_step = False  # whether a forward or a move reads the registry's own
        self._substeps: dict[tuple[str, str, int, int], CapturedSubstep] = {}
        self._in_order: list[CapturedSubstep] = []
        self._launch_group: dict[tuple[tuple[Part, ...], CapturedAcceptance | None], LaunchGroup] = {}
        self.moves: list[CapturedMove] = []
        self.publish: Callable[[], None] = lambda: None
        self.accepted_tokens: AcceptedTokens | None = None
        self.max_pending_acceptances = 0
        self.compares_moves, self.compares_reads = True, False
        self._read_keys: dict[str, ReadKeys] = {}
        self._is_armed = False
        with torch.inference_mode(False):
            self.step = torch.zeros(1, dtype=torch.int64, device=device)
            self._headers = torch.zeros(CAPACITY, HEADER, dtype=torch.int64, device=device)
            claims = {
                pool.name: torch.full((pool.view.num_slots,), NO_CLAIM, dtype=torch.int64, device=device)
                for pool in state.pools
            }
        self.shared = Shared(state, self.step, claims, SideStream(device))
        self._mailbox = Mailbox(self._headers)
        self._seen = np.zeros((CAPACITY, HEADER), np.int64)
        self._seen_at, self._loops = self._seen.ctypes.data, state.pools[0].loops
        self._planned, self._unplanned = array("q"), array("q")  # the second: to be copied
        self._expects = False  # forwards that no launch tells of

    def __iter__(self) -> Iterator[CapturedSubstep]:
        return iter(self._in_order)

    def __len__(self) -> int:
        return len(self._in_order)

    def add(
        self,
        pool: str,
        kind: str,
        index: int,
        inputs: StaticBuffers | ForwardPlan,
        step: Tensor | None = None,
        **settings: Any,
    ) -> CapturedSubstep:
        """A substep over these inputs; their number of rows is its bucket. `settings`: fields of `Settings`.

        step: [1] int64 that the caller fills with `RowTruth.step` before each run; None: the registry's, in a launch of
              its own at every step
        """
        self._expect_unarmed("add()", f"{site_name(kind, index)} of the {pool} pool is")
        number, own, made = len(self._in_order), self._pool(pool), Settings(**settings)
        if own.is_partial:
            raise PlanError(
                f"pool {pool!r} must have neither slot_map nor window in a captured substep: judge it by substep()"
            )
        if number == CAPACITY:
            raise PlanError(f"a registry of {CAPACITY} substeps is full: capture fewer buckets")
        if inputs.lineage is not None:
            made = replace(made, before=self._before(pool, kind, index, inputs.num_rows).work)
        if made.attends and self.compares_reads:
            made = replace(made, read_keys=self._keys_of(own))
        header = self._headers[number]
        substep = CapturedSubstep(self._shared(step), own, (kind, index), inputs, header, number, made)
        key = pool, kind, index, substep.forward.num_rows
        if key in self._substeps:
            raise PlanError(f"a registry holds each substep once, got {substep} twice")
        self._substeps[key] = substep
        self._in_order.append(substep)
        self._planned.extend(bytes(NUM_RUNS))
        self._unplanned.extend(bytes(NUM_RUNS))
        return substep

    def add_move(self, pool: str, size: int, step: Tensor | None = None) -> CapturedMove:
        """A declared move of at most ``size`` entries within this pool; `step` as for `add`."""
        self._expect_unarmed("add_move()", f"the move in the {pool} pool is")
        self.moves.append(CapturedMove(self._shared(step), self._pool(pool), size, self.compares_moves))
        return self.moves[-1]

    def add_accepted_tokens(self, num_table_rows: int, places: int) -> AcceptedTokens:
        """For captured steps that accept up to ``places`` tokens a request, whose host may not have collected them."""
        self._expect_unarmed("add_accepted_tokens()", "they are")
        self.accepted_tokens, self.max_pending_acceptances = AcceptedTokens(self.shared, num_table_rows, places), 1
        return self.accepted_tokens

    def add_truth(self, pool: str, table_rows: Tensor, *known: Tensor) -> CapturedTruth:
        """The truth of rows of this pool in one program; arguments of `CapturedTruth`."""
        if self.accepted_tokens is None:
            raise HookOrderError("add_truth() must follow add_accepted_tokens(): nobody keeps what was accepted")
        return CapturedTruth(self.accepted_tokens, self._state.by_name[pool], table_rows, *known)

    def launch_group(
        self, *parts: Sequence[CapturedSubstep], acceptance: CapturedAcceptance | None = None
    ) -> LaunchGroup:
        """Substeps that are launched together, in parts of one kind and pool: the same for the same ones.

        acceptance: of the step whose tokens the last part writes
        """
        key = tuple(map(tuple, parts)), acceptance
        if key not in self._launch_group:
            self._launch_group[key] = LaunchGroup(*key)
        return self._launch_group[key]

    def join(self) -> None:
        """What is launched from now on follows all that substeps have launched beside it, or postponed."""
        self.shared.side_stream.finish()

    def arm(self) -> None:
        """Everything is warmed up and captured: what has run so far is forgotten, what comes is counted."""
        if self.shared.opened:
            raise self._not_closed("arm()")
        self._is_armed = True
        self._headers.zero_()
        self._seen.fill(0)
        self._planned = self._unplanned[:]
        self._expects = False
        for substep in self._in_order:
            substep.work.forget_firsts(self.now & MASK_32)

    def begin_step(self, step: int) -> None:
        """The number that records and findings carry from here on, on the stream of the forwards."""
        self.turn += 1
        self.now = self.turn << 32 | step & MASK_32
        if self._reads_step:
            self.step.fill_(self.now)

    def expect(self, substep: CapturedSubstep, rows: int, entries: int, reads: int) -> None:
        """The host launches this forward now, with so many live rows, entries written, and entries of rows read."""
        self.publish()
        number, planned = substep.number, self._planned
        if number is None:
            raise PlanError(f"expect() needs a substep that was added, got {substep}: its forward comes once")
        first = number * NUM_RUNS
        self._expects = True
        planned[first + RUN_ROWS] += rows
        planned[first + RUN_WRITTEN] += entries
        planned[first + RUN_READ] += reads

    def load(self, substep: CapturedSubstep, batch: Batch) -> None:
        """Fill the buffers of a forward that runs next, and expect it to run."""
        if substep.buffers is None:
            raise PlanError(f"load() needs StaticBuffers: {substep} reads the engine's own tensors, expect() it")
        substep.buffers.fill(batch)
        self.expect(substep, batch.num_rows, batch.num_entries, batch.indices.numel())

    def begin_readback(
        self,
        launches: Sequence[Launch] = (),
        once: Sequence[tuple[OneShotSubstep, Ints]] = (),
        structs: array[int] | None = None,
    ) -> PendingReadback:
        """What `readback` needs of all that has run since the last one, on its way.

        launches: of numbered substeps, whose headers are on their way already; none, or where others were expected to
                  run: all headers go in one small copy. Nobody waits for it
        once, structs: as in the `PendingReadback`
        """
        if self.shared.opened:
            raise self._not_closed("read_back()")
        planned, headers = self._planned, None
        self._planned = self._unplanned[:]
        if self._in_order and (self._expects or not launches):
            headers = dict(enumerate(self._mailbox.send()[: len(self._in_order)]))
            self._expects = False
        own = headers, once, planned, launches, array("q") if structs is None else structs
        return tuple.__new__(PendingReadback, own)  # as `PendingReadback(*own)`, without a call

    def read_back(self, pending: PendingReadback, step: int) -> Readback:
        """What fired and what did not run between the last one that was read back and this one, whose copy is over.

        step: what the violations are labelled with. Details are read only where something fired, and waited for.
        """
        readback = Readback()
        if pending.headers is not None or not self._is_quiet(pending, readback.runs):
            self._take_all(pending, readback, step)
        for substep, header in pending.once:
            self._take(substep, header, substep.planned, readback, step, None)
        return readback

    # helpers

    def _expect_unarmed(self, call: str, late: str) -> None:
        if self._is_armed:
            raise HookOrderError(f"{call} must come before arm(): {late} late")

    def _pool(self, name: str) -> PoolState:
        if name not in self._state.by_name:
            raise PlanError(f"pool must be one of {', '.join(self._state.by_name)}, got {name!r}")
        return self._state.by_name[name]

    def _shared(self, step: Tensor | None) -> Shared:
        if step is not None:
            return replace(self.shared, step=step)
        self._reads_step = True
        return self.shared

    def _before(self, pool: str, kind: str, index: int, rows: int) -> CapturedSubstep:
        """The forward from whose entries rows with a lineage go on."""
        before = self._substeps.get((pool, kind, index - 1, rows))
        if before is None:
            raise PlanError(
                f"a lineage names branches of {site_name(kind, index - 1)} of the {pool} pool with {rows} rows: add() "
                f"that before {site_name(kind, index)}"
            )
        return before

    def _keys_of(self, pool: PoolState) -> ReadKeys | None:
        """For attention over this pool; None where it does not read whole rows."""
        if not reads_fit(pool.rows, pool.view.kv_heads):
            return None
        if pool.name not in self._read_keys:
            with torch.inference_mode(False):
                self._read_keys[pool.name] = ReadKeys(pool.rows, pool.keys, pool.view.kv_heads)
        return self._read_keys[pool.name]

    @property
    def seen(self) -> tuple[int, int, int]:
        """Address of the headers as they were taken last, and their sizes, as `loops.take_quiet` has them."""
        return self._seen_at, 2 * NUM_BITS, HEADER

    def _is_quiet(self, pending: PendingReadback, runs: array[int]) -> bool:
        """Whether all headers were taken by `loops.take_quiet`."""
        structs = pending.structs
        at = structs.buffer_info()[0], self._seen_at, pending.planned.buffer_info()[0], runs.buffer_info()[0]
        return bool(self._loops.take_quiet(len(structs) // RUN.size, *at, 2 * NUM_BITS, HEADER))

    def _take_all(self, pending: PendingReadback, readback: Readback, step: int) -> None:
        headers, runs = pending.headers, {run.substep.number: run for run in runs_of(pending.launches)}
        if headers is None:
            headers = {number: run.message[HEADER_PART] for number, run in runs.items() if number is not None}
        for number, header in headers.items():
            header = np.maximum(header, self._seen[number])  # a line that a run before has left says less
            new = header - self._seen[number]
            self._seen[number] = header
            planned = pending.planned[number * NUM_RUNS : (number + 1) * NUM_RUNS].tolist()
            self._take(self._in_order[number], new, planned, readback, step, runs.get(number))

    @torch.inference_mode()
    def _take(
        self,
        substep: CapturedSubstep,
        header: Ints,
        planned: list[int],
        readback: Readback,
        step: int,
        run: Launched | None,
    ) -> None:
        """What a substep says since the last time into the readback, H1 where it covered what was not planned."""
        counts, runs = header[: 2 * NUM_BITS], header[2 * NUM_BITS :].tolist()
        if counts.any():
            violations = read_violations(substep, torch.from_numpy(counts).view(2, NUM_BITS), step, run)
            readback.violations += violations
            readback.rows += rows_of(substep, violations)
        if planned != runs:
            both = Amounts(*planned), Amounts(*runs)
            readback.gaps.append(CoverageGap(substep.pool.name, substep.site, substep.forward.num_rows, *both))
        for number, count in enumerate(runs):
            readback.runs[number] += count

    def _not_closed(self, what: str) -> HookOrderError:
        return HookOrderError(f"{what} must wait for close() of {next(iter(self.shared.opened))}")
