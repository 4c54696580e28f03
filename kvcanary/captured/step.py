"""CapturedStep: the manager's captured substeps, what the host learns of their writes, and what they found as
violations.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.entries import Entries
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.captured.decoded import DecodedForward, lineage_of, tokens_of
from kvcanary.captured.launch_group import Launch, Launched, LaunchGroup, runs_of
from kvcanary.captured.moves import CapturedMove, LaunchedMove
from kvcanary.captured.one_shot import OneShotSubstep, Singles
from kvcanary.captured.readback import CapturedViolation, CoverageGap, judge_read_rows, read_rows
from kvcanary.captured.registry import PendingReadback, SubstepRegistry
from kvcanary.captured.substep import HEADER_PART, SAFE, CapturedSubstep
from kvcanary.checks.content import find_changed
from kvcanary.checks.fast_path import RunReader
from kvcanary.errors import PageStateError
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.requests import Batch
from kvcanary.ledger.row_truth import RowTruth
from kvcanary.native.layout import (
    HAS_MORE,
    HAS_RUN,
    IS_SHORT,
    LACKING_BITS,
    LACKS_ROOM,
    MOVE,
    NOT_QUIET,
    NOWHERE,
    PLACE_BITS,
    RUN,
    RUN_BITS,
    SAID,
)
from kvcanary.pools.plans import ReadPlan, WritePlan
from kvcanary.provenance.not_finite import layers_not_finite
from kvcanary.records.mailbox import NUM_MESSAGES
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState, PoolState

Unwritten = Callable[[Sequence[Request], int], None]


class Listener(Protocol):
    """Who keeps what the host learns of captured forwards."""

    def learned(self, run: Launched, forward: DecodedForward) -> None:
        """What a run says of itself."""

    def collected(self, launches: Sequence[Launch], moves: Sequence[LaunchedMove], numbers: array[int]) -> None:
        """The same of all runs of these, which were proved clean: numbers of each, one behind the other, as
        `CollectedRun` has them, and behind them the places of moves.
        """

    def collected_one(self, run: Launched) -> None:
        """The same of one run, among others that were not."""

    def moved(self, run: LaunchedMove) -> None:
        """What a launched move says of itself."""

    def noticed(self, violation: CapturedViolation) -> None:
        """A check on the device fired."""


class SentStep(NamedTuple):
    """What the device says of one step: there when the flight's copies are over.

    move_structs: of the moves, [MOVE.size] each (native/layout.py)
    num_kept: numbers that the listener keeps of all of them, if they are clean
    """

    step: int
    launches: Sequence[Launch]
    moves: Sequence[LaunchedMove]
    move_structs: array[int]
    pending: PendingReadback
    num_kept: int

    @property
    def forwards(self) -> list[Launched]:
        """Of the launches, one by one."""
        return runs_of(self.launches)


class CapturedStep:
    """Substeps that are captured or replayed: they judge on the device, and the host reads what fired once a step.

    launched, moves: forwards and moves that no `send` has taken along
    num_pending_acceptances:    steps that accept what the host has not learned yet
    listener:        who is given what was learned of them, and every violation
    """

    def __init__(self, state: CanaryState, ledger: Ledger, coverage: Coverage, listener: Listener) -> None:
        self._state, self._ledger, self._coverage, self.listener = state, ledger, coverage, listener
        self._loops = state.pools[0].loops
        self.registry = SubstepRegistry(state)
        self.registry.publish = partial(state.publish, ledger.pages)
        self._singles = Singles(replace(self.registry.shared, opened=set()))
        self._run_reader: RunReader | None = None
        self._num_collected = 0  # of the runs that are collected: those before the rules begin
        self.launched: list[Launch] = []
        self._structs = array("q")  # of their runs, [RUN.size] each (native/layout.py)
        self._num_kept = 0  # of them and of moves
        self._has_singles = False  # among these
        self.num_pending_acceptances = 0
        self._lacking: list[tuple[CapturedSubstep, Batch]] = []  # launched over rows whose requests lack pages of them
        self.moves: list[LaunchedMove] = []
        self._move_structs = array("q")  # of them, [MOVE.size] each (native/layout.py)

    def launch(
        self,
        launch_group: LaunchGroup,
        batch: Batch,
        step: int,
        written: array[int],
        reads: Sequence[int],
        record: Any,
        where: int = 0,
    ) -> array[int]:
        """These requests are the live rows of these forwards, which run next: what is known of them, by part as
        `RowTruth` has it.

        written: by part of which the host says it, and by request, entries that each of its rows writes in each forward
        reads: by forward, as the engine knows the lengths of rows; record: the listener's, by forward, which knows how
        many numbers are kept of clean ones. where: as of `loops.launch_runs`
        """
        registry, structs = self.registry, self._structs
        (n, structs_at), (num_parts, sizes) = batch.loop_arguments, launch_group.sizes
        turn, rows, first = registry.turn, batch.no_rows * num_parts, len(structs)
        structs += launch_group.structs[turn % NUM_MESSAGES]
        structs[first + RUN.reads :: RUN.size] = array("q", reads)
        if said := self._loops.launch_runs(
            n,
            structs_at,
            structs.buffer_info()[0] + 8 * first,
            num_parts,
            sizes,
            rows.buffer_info()[0],
            written.buffer_info()[0],
            turn,
            step,
            registry.now,
            registry.max_pending_acceptances,
            record is not None,
            where,
        ):
            if unknown := said & (1 << LACKING_BITS) - 1:
                self._coverage.skip("truth not known to the host", unknown)
            if said >> LACKING_BITS:
                self._lacking += [(substep, batch) for substep in launch_group]
        if launch_group.places:
            self.num_pending_acceptances += 1
        if record is not None:
            self._num_kept += record.num_kept
        own = launch_group, batch, rows, step, turn, written, record
        self.launched.append(tuple.__new__(Launch, own))  # as `Launch(*own)`, without a call
        return rows

    def take_once(
        self,
        pool: PoolState,
        site: tuple[str, int],
        read: ReadPlan,
        write: WritePlan,
        batch: Batch,
        written: list[int],
    ) -> OneShotSubstep:
        """What is launched for a forward that comes once, as an engine's own tensors describe it."""
        rows, _ = self._ledger.steps.describe_rows(batch, pool.pool_id, self.registry.max_pending_acceptances)
        self._has_singles = True
        return self._singles.take(pool, site, read, write, written, RowTruth(rows, self.registry.now))

    def launch_move(self, move: CapturedMove, record: Any) -> None:
        """This move runs next. record: the listener's."""
        turn, num_kept = self.registry.turn, 0 if record is None else move.num_places
        own = move, turn, record
        self.moves.append(tuple.__new__(LaunchedMove, own))  # as `LaunchedMove(*own)`, without a call
        struct = move.structs[turn % NUM_MESSAGES]
        struct[MOVE.turn], struct[MOVE.keep] = turn, num_kept
        self._move_structs += struct
        self._num_kept += num_kept

    def judge_lacking(self, step: int) -> list[Violation | ViolationBatch]:
        """R7 and R8 of forwards whose requests lack pages, where rows name others in spite of that; waits for them."""
        lacking, self._lacking = self._lacking, []
        if not lacking:
            return []
        with torch.inference_mode():
            rows = [row for substep, batch in lacking for row in read_rows(substep, range(substep.width * len(batch)))]
        return [*judge_read_rows(self._ledger, rows, step)]

    def send(self, step: int) -> SentStep:
        """What has run since the last time is on its way to the host."""
        launches, structs, num_kept = self.launched, self._structs, self._num_kept
        self.launched, self._structs, self._num_kept = [], array("q"), 0
        moved = self.moves, self._move_structs
        if self.moves:
            self.moves, self._move_structs = [], array("q")
        if not self._has_singles:
            own = step, launches, *moved, self.registry.begin_readback(launches, (), structs), num_kept
            return tuple.__new__(SentStep, own)  # as `SentStep(*own)`, without a call
        launches, structs = self._keep_open(launches, structs)
        runs = ((run.substep, run.message[HEADER_PART]) for run in runs_of(launches))
        once = [(substep, header) for substep, header in runs if isinstance(substep, OneShotSubstep)]
        known = [launch for launch in launches if not launch.launch_group.comes_once]
        return SentStep(step, launches, *moved, self.registry.begin_readback(known, once, structs), num_kept)

    def _keep_open(self, launches: list[Launch], structs: array[int]) -> tuple[list[Launch], array[int]]:
        """Those of these that are closed; a forward that comes once and is open is sent later."""
        closed, closed_structs, end = list[Launch](), array("q"), 0
        for launch in launches:
            first, end = end, end + RUN.size * len(launch.launch_group)
            is_open = any(substep.is_open for substep in launch.launch_group)
            (self.launched if is_open else closed).append(launch)
            (self._structs if is_open else closed_structs).extend(structs[first:end])
        self._has_singles = bool(self.launched)
        return closed, closed_structs

    def collect_quiet(self, sent: SentStep, record_store: RecordStore, proves: bool) -> bool:
        """Whether all has run as planned and was proved clean and nothing fired: all is done, then, that follows do.

        Else `learn`, `learn_moves`, `readback` and `finalise` go on from where it has come to. Copies are over.
        """
        _, launches, moves, move_structs, (headers, once, planned, _, structs), num_kept = sent
        self._num_collected = 0
        if not launches or once or headers is not None:
            return False
        run_reader = self._run_reader or self._hear_of(record_store)
        kept = array("q", bytes(8 * num_kept))
        run_reader.said[SAID.end] = 0
        while (found := run_reader.prove(structs, len(moves), move_structs, planned, kept, proves)) == LACKS_ROOM:
            for launch in launches:
                launch.make_room()
        if found == NOT_QUIET:
            self._num_collected = run_reader.said[SAID.end]
            return False
        if self.num_pending_acceptances:
            self.num_pending_acceptances -= len([launch for launch in launches if launch.launch_group.places])
        if kept:
            self.listener.collected(launches, moves, kept)
        if found == HAS_MORE:
            self._finalise_from(sent, run_reader.said[SAID.place])
        return True

    def learn(
        self, sent: SentStep, record_store: RecordStore, unwritten: Unwritten, proves: bool
    ) -> Iterator[DecodedForward]:
        """Forwards for the rules, in the order of their run; pages are written, and the record store knows where new
        records lie. Copies are over.

        unwritten: is told of requests of which entries became final in a step that nobody has written
        proves: a forward that a loop finds clean is not left to the rules
        """
        run_reader, forwards, ledger = self._run_reader or self._hear_of(record_store), sent.forwards, self._ledger
        structs, planned, end, num_learned = sent.pending.structs, sent.pending.planned, 0, 0
        num_collected, self._num_collected = self._num_collected, 0
        while (first := end) < len(forwards):
            while (end := num_collected or run_reader.read(first, len(forwards), structs, planned, proves)) == first:
                forwards[first].make_room()
            num_collected = 0
            for number in range(first, end):
                run, seen = forwards[number], structs[RUN.size * number + RUN.seen]
                substep, requests, accepted = run.substep, run.batch.requests, run.accepted
                self.num_pending_acceptances -= accepted is not None
                if seen & IS_SHORT:
                    unwritten(requests, run.step)
                if not seen & HAS_RUN:  # H1 says so
                    continue
                if run_reader.is_clean(seen >> RUN_BITS, run.message[SAFE]):
                    num_learned += 1
                    self.listener.collected_one(run)
                    continue
                tokens = None if accepted is None else tokens_of(accepted[: len(requests)])
                forward = DecodedForward(substep, run.step, len(requests), run.message.parts(), tokens, requests)
                if not forward.is_plan:
                    self._coverage.skip("captured forwards whose plans contradict themselves", 1)
                    continue
                num_learned += 1
                ledger.pages.wrote(forward.slots, ledger.page_size)
                record_store.learn(forward.slots + forward.pool.base)
                yield forward
                self.listener.learned(run, forward)
        self._coverage.forwards += num_learned

    def _hear_of(self, record_store: RecordStore) -> RunReader:
        """What hears of runs, from the first step on."""
        self._run_reader = RunReader(self._state, self._ledger.pages, record_store, self.registry.seen)
        return self._run_reader

    def learn_moves(self, sent: SentStep, record_store: RecordStore) -> None:
        """Entries that have arrived lengthen rows; after `learn`."""
        for run in sent.moves:
            self.listener.moved(run)
            (slots, _, tokens), pool = run.entries, run.move.pool
            if len(slots):
                record_store.learn(slots + pool.base)
                positions = tokens.view(np.uint64) >> 32
                self._ledger.rows.note_moved(pool.pool_id, slots, positions.view(np.int64))

    def finalise(self, sent: SentStep) -> None:
        """Pages of what was final when forwards were launched are written no more; after `learn` and its moves.

        A page that no forward has written as planned stays as it is: the device's codes say why.
        """
        self._finalise_from(sent, self._ledger.steps.finalise_runs(sent.pending.structs, 0))

    def _finalise_from(self, sent: SentStep, place: int) -> None:
        """`place`: where `loops.finalise_runs` stands."""
        ledger = self._ledger
        try:
            while place != NOWHERE:
                one, number = divmod(place, 1 << PLACE_BITS)
                run, place = sent.forwards[one], place + 1
                request = run.batch.requests[number]
                try:
                    ledger.finalise(request, sent.step, run.committed[number] if request.in_flight else None)
                except PageStateError:
                    self._coverage.skip("pages that should be final and were not written", 1)
                place = ledger.steps.finalise_runs(sent.pending.structs, place)
        finally:
            ledger.record_final_pages(sent.step)

    def read_back(self, sent: SentStep) -> list[Violation | ViolationBatch]:
        """Violations and gaps of the step."""
        readback = self.registry.read_back(sent.pending, sent.step)
        for substep, _ in sent.pending.once:
            self._singles.give(substep)
        for violation in readback.violations:
            self.listener.noticed(violation)
        rows, entries, reads = readback.runs
        self._cover(rows > 0 and not sent.launches, entries, reads, entries > 0)
        violations: list[Violation | ViolationBatch] = [*judge_read_rows(self._ledger, readback.rows, sent.step)]
        if readback.violations:
            runs = sent.forwards
            with torch.inference_mode():
                for violation in readback.violations:
                    violations += self._named(self._violation(violation, runs))
        return violations + [self._gap(gap, sent.step) for gap in readback.gaps]

    def count_quiet(self) -> None:
        """What has run in steps that `collect_quiet` has finished goes into the coverage."""
        if self._run_reader is not None:
            said = self._run_reader.said
            counts = slice(SAID.forwards, SAID.size)
            self._cover(*said[counts])
            said[counts] = array("q", bytes(8 * (SAID.size - SAID.forwards)))

    def _cover(self, forwards: int, entries: int, reads: int, writers: int) -> None:
        """Steps of so many forwards have written and read entries; `writers`: those of them that wrote some."""
        self._coverage.forwards += forwards
        self._coverage.slots_sealed += entries
        self._coverage.slots_checked += reads
        self._coverage.unproved_stores += writers

    def _named(self, violation: Violation) -> list[Violation]:
        """R9 as a re-read of the slot finds it: layers that differ, or R3; as it is where nothing differs any more."""
        request = None if violation.request_id is None else self._ledger.requests.get(violation.request_id)
        if violation.code != "R9" or violation.position is None or request is None:
            return [violation]
        queue = request.reads[violation.pool.pool_id]
        queue.extend_to(request.final_len(violation.pool.pool_id), request.commit_step)
        read = queue.last_read(violation.position)
        slots, positions, rows = np.array([[violation.slot], [violation.position], [0]], np.int64)
        entries = Entries(slots, positions, rows, [request.request_id], np.array([read]))
        where = violation.pool, slots, lambda: entries, violation.site, violation.step
        found = [batch.violation(0) for batch in find_changed(*where, both_fingerprints=False) if len(batch)]
        for one in found:
            one.others = violation.others
        return found or [violation]

    def _violation(self, violation: CapturedViolation, runs: Sequence[Launched]) -> Violation:
        pool = self._state.by_name[violation.pool]
        position = violation.place if violation.place >= 0 else None
        name = self._ledger.name(violation.uid) if violation.uid >= 0 else None
        others = tuple(other for uid in violation.others if (other := self._ledger.name(uid)) is not None)
        own = violation.code, pool, violation.slot, position, name, violation.site, violation.step
        layers = _layers_of(violation, pool)
        return Violation(*own, layers, lineage=lineage_of(violation, runs), is_captured=True, others=others)

    def _gap(self, gap: CoverageGap, step: int) -> Violation:
        pool, planned, run = self._state.by_name[gap.pool], gap.planned._asdict(), gap.run._asdict()
        return Violation("H1", pool, -1, None, None, gap.site, step, expected=planned, found=run)


def _layers_of(violation: CapturedViolation, pool: PoolState) -> tuple[int, ...]:
    """Of what is not finite, in which layers of its slot; else none is named."""
    if violation.code != "N1" or not 0 <= violation.slot < pool.view.num_slots:
        return ()
    return layers_not_finite(pool.rows, torch.tensor([violation.slot], device=pool.records.device))[0]
