"""CapturedStep: the manager's static substeps, what the host learns of their writes, and their harvest as findings."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.entries import Entries
from kvcanary.calls.violation import Hit
from kvcanary.calls.violation_log import HitBatch
from kvcanary.captured.decoded import DecodedForward, Launch, Launched, lineage_of, runs_of, tokens_of
from kvcanary.captured.launch_group import LaunchGroup
from kvcanary.captured.moves import CapturedMove, LaunchedMove
from kvcanary.captured.one_shot import OneShotSubstep, Singles
from kvcanary.captured.pending import Hearing, make_room
from kvcanary.captured.readback import CapturedHit, CoverageGap, judge_read_rows, read_rows
from kvcanary.captured.registry import Snapshot, SubstepRegistry
from kvcanary.captured.substep import HEADER_PART, CapturedSubstep
from kvcanary.checks.content import find_changed
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
    REWRITES,
    RUN,
    RUN_BITS,
    SAID,
)
from kvcanary.pools.plans import (
    ReadPlan,
    WritePlan,
)
from kvcanary.records.mailbox import LINES
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState, PoolState

Unwritten = Callable[[Sequence[Request], int], None]


class Listener(Protocol):
    """Who keeps what the host learns of captured forwards."""

    def learned(self, run: Launched, forward: DecodedForward) -> None:
        """What a run says of itself."""

    def heard(self, launches: Sequence[Launch], moves: Sequence[LaunchedMove], numbers: array[int]) -> None:
        """The same of all runs of these, which were proved clean: numbers of each, one behind the other, as `Heard` has
        them, and behind them the places of moves.
        """

    def heard_one(self, run: Launched) -> None:
        """The same of one run, among others that were not."""

    def moved(self, run: LaunchedMove) -> None:
        """What a launched move says of itself."""

    def noticed(self, hit: CapturedHit) -> None:
        """A check on the device fired."""


class Told(NamedTuple):
    """What the device says of one step: there when the flight's copies are over.

    move_cards: of the moves, [MOVE.size] each (native/layout.py)
    num_kept: numbers that the listener keeps of all of them, if they are clean
    """

    step: int
    launches: Sequence[Launch]
    moves: Sequence[LaunchedMove]
    move_cards: array[int]
    snapshot: Snapshot
    num_kept: int

    @property
    def forwards(self) -> list[Launched]:
        """Of the launches, one by one."""
        return runs_of(self.launches)


class CapturedStep:
    """Substeps that are captured or replayed: they judge on the device, and the host reads what fired once a step.

    launched, moves: forwards and moves that no `send` has taken along
    num_unlanded:    steps that accept what the host has not learned yet
    listener:        who is told what was learned of them, and of every hit
    """

    def __init__(self, state: CanaryState, ledger: Ledger, coverage: Coverage, listener: Listener) -> None:
        self._state, self._ledger, self._coverage, self.listener = state, ledger, coverage, listener
        self._loops = state.pools[0].loops
        self.bank = SubstepRegistry(state)
        self.bank.publish = partial(state.publish, ledger.pages)
        self._singles = Singles(replace(self.bank.shared, opened=set()))
        self._hearing: Hearing | None = None
        self._num_heard = 0  # of the runs that land: those before the rules begin
        self.launched: list[Launch] = []
        self._cards = array("q")  # of their runs, [RUN.size] each (native/layout.py)
        self._num_kept = 0  # of them and of moves
        self._has_singles = False  # among these
        self.num_unlanded = 0
        self._lacking: list[tuple[CapturedSubstep, Batch]] = []  # launched over rows whose requests lack pages of them
        self.moves: list[LaunchedMove] = []
        self._move_cards = array("q")  # of them, [MOVE.size] each (native/layout.py)

    def launch(
        self,
        series: LaunchGroup,
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
        bank, (n, cards_at), (num_parts, sizes), cards = self.bank, batch.told, series.sizes, self._cards
        turn, rows, first = bank.turn, batch.no_rows * num_parts, len(cards)
        cards += series.cards[turn % LINES]
        cards[first + RUN.reads :: RUN.size] = array("q", reads)
        if said := self._loops.launch_runs(
            n,
            cards_at,
            cards.buffer_info()[0] + 8 * first,
            num_parts,
            sizes,
            rows.buffer_info()[0],
            written.buffer_info()[0],
            turn,
            step,
            bank.now,
            bank.most_unlanded,
            record is not None,
            where,
        ):
            if unknown := said & (1 << LACKING_BITS) - 1:
                self._coverage.skip("truth not known to the host", unknown)
            if said >> LACKING_BITS:
                self._lacking += [(substep, batch) for substep in series]
        if series.places:
            self.num_unlanded += 1
        if record is not None:
            self._num_kept += record.num_kept
        own = series, batch, rows, step, turn, written, record
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
        rows, _ = self._ledger.steps.tell_rows(batch, pool.pool_id, self.bank.most_unlanded)
        self._has_singles = True
        return self._singles.take(pool, site, read, write, written, RowTruth(rows, self.bank.now))

    def launch_move(self, move: CapturedMove, record: Any) -> None:
        """This move runs next. record: the listener's."""
        turn, num_kept = self.bank.turn, 0 if record is None else move.num_places
        own = move, turn, record
        self.moves.append(tuple.__new__(LaunchedMove, own))  # as `LaunchedMove(*own)`, without a call
        card = move.cards[turn % LINES]
        card[MOVE.turn], card[MOVE.keep] = turn, num_kept
        self._move_cards += card
        self._num_kept += num_kept

    def judge_lacking(self, step: int) -> list[Hit | HitBatch]:
        """R7 and R8 of forwards whose requests lack pages, where rows name others in spite of that; waits for them."""
        lacking, self._lacking = self._lacking, []
        if not lacking:
            return []
        with torch.inference_mode():
            rows = [row for substep, batch in lacking for row in read_rows(substep, range(substep.width * len(batch)))]
        return [*judge_read_rows(self._ledger, rows, step)]

    def send(self, step: int) -> Told:
        """What has run since the last time is on its way to the host."""
        launches, cards, num_kept = self.launched, self._cards, self._num_kept
        self.launched, self._cards, self._num_kept = [], array("q"), 0
        moved = self.moves, self._move_cards
        if self.moves:
            self.moves, self._move_cards = [], array("q")
        if not self._has_singles:
            own = step, launches, *moved, self.bank.snapshot(launches, (), cards), num_kept
            return tuple.__new__(Told, own)  # as `Told(*own)`, without a call
        launches, cards = self._keep_open(launches, cards)
        once = [
            (run.substep, run.line[HEADER_PART]) for run in runs_of(launches) if isinstance(run.substep, OneShotSubstep)
        ]
        known = [launch for launch in launches if not launch.series.comes_once]
        return Told(step, launches, *moved, self.bank.snapshot(known, once, cards), num_kept)

    def _keep_open(self, launches: list[Launch], cards: array[int]) -> tuple[list[Launch], array[int]]:
        """Those of these that are closed; a forward that comes once and is open is sent later."""
        closed, closed_cards, end = list[Launch](), array("q"), 0
        for launch in launches:
            first, end = end, end + RUN.size * len(launch.series)
            is_open = any(substep.is_open for substep in launch.series)
            (self.launched if is_open else closed).append(launch)
            (self._cards if is_open else closed_cards).extend(cards[first:end])
        self._has_singles = bool(self.launched)
        return closed, closed_cards

    def land_quiet(self, told: Told, mirror: RecordStore, proves: bool) -> bool:
        """Whether all has run as planned and was proved clean and nothing fired: all is done, then, that follows do.

        Else `learn`, `learn_moves`, `harvest` and `finalise` go on from where it has come to. Copies are over.
        """
        _, launches, moves, move_cards, (headers, once, planned, _, cards), num_kept = told
        self._num_heard = 0
        if not launches or once or headers is not None:
            return False
        hearing = self._hearing or self._hear_of(mirror)
        kept = array("q", bytes(8 * num_kept))
        runs = len(cards) // RUN.size, cards.buffer_info()[0], len(moves), move_cards.buffer_info()[0]
        own = planned.buffer_info()[0], proves, kept.buffer_info()[0], hearing.quiet_at
        hearing.said[SAID.end] = 0
        while (found := hearing.land_quiet(*runs, *own)) == LACKS_ROOM:
            for launch in launches:
                make_room(launch.batch, launch.series.places)
        if found == NOT_QUIET:
            self._num_heard = hearing.said[SAID.end]
            return False
        mirror.heard(hearing.said[SAID.seen] >> RUN_BITS & REWRITES)
        if self.num_unlanded:
            self.num_unlanded -= len([launch for launch in launches if launch.series.places])
        if kept:
            self.listener.heard(launches, moves, kept)
        if found == HAS_MORE:
            self._finalise_from(told, hearing.said[SAID.place])
        return True

    def learn(self, told: Told, mirror: RecordStore, unwritten: Unwritten, proves: bool) -> Iterator[DecodedForward]:
        """Forwards for the rules, in the order of their run; pages are written, and the mirror knows where new records
        lie. Copies are over.

        unwritten: is told of requests of which entries became final in a step that nobody has written
        proves: a forward that a loop finds clean is not left to the rules
        """
        hearing, forwards, ledger = self._hearing or self._hear_of(mirror), told.forwards, self._ledger
        cards, end, num_learned, num_heard = told.snapshot.cards, 0, 0, self._num_heard
        self._num_heard = 0
        while (first := end) < len(forwards):
            end = num_heard or hearing.hear(forwards, cards, first, told.snapshot.planned, proves)
            num_heard = 0
            for number in range(first, end):
                run, seen = forwards[number], cards[RUN.size * number + RUN.seen]
                substep, requests, accepted = run.substep, run.batch.requests, run.accepted
                self.num_unlanded -= accepted is not None
                if seen & IS_SHORT:
                    unwritten(requests, run.step)
                if not seen & HAS_RUN:  # H1 says so
                    continue
                if hearing.is_clean(run, seen >> RUN_BITS):
                    num_learned += 1
                    self.listener.heard_one(run)
                    continue
                tokens = None if accepted is None else tokens_of(accepted[: len(requests)])
                forward = DecodedForward(substep, run.step, len(requests), run.line.parts(), tokens, requests)
                if not forward.is_plan:
                    self._coverage.skip("captured forwards whose plans contradict themselves", 1)
                    continue
                num_learned += 1
                ledger.pages.wrote(forward.slots, ledger.page_size)
                mirror.learn(forward.slots + forward.pool.base)
                yield forward
                self.listener.learned(run, forward)
        self._coverage.forwards += num_learned

    def _hear_of(self, mirror: RecordStore) -> Hearing:
        """What hears of runs, from the first step on."""
        self._hearing = Hearing(self._state, self._ledger.pages, mirror, self.bank.seen)
        return self._hearing

    def learn_moves(self, told: Told, mirror: RecordStore) -> None:
        """Entries that have arrived lengthen rows; after `learn`."""
        for run in told.moves:
            self.listener.moved(run)
            (slots, _, tokens), pool = run.entries, run.move.pool
            if len(slots):
                mirror.learn(slots + pool.base)
                positions = tokens.view(np.uint64) >> 32
                self._ledger.rows.note_moved(pool.pool_id, slots, positions.view(np.int64))

    def finalise(self, told: Told) -> None:
        """Pages of what was final when forwards were launched are written no more; after `learn` and its moves.

        A page that no forward has written as planned stays as it is: the device's codes say why.
        """
        self._finalise_from(told, self._ledger.steps.land_runs(told.snapshot.cards, 0))

    def _finalise_from(self, told: Told, place: int) -> None:
        """`place`: where `loops.land_runs` stands."""
        ledger = self._ledger
        try:
            while place != NOWHERE:
                one, number = divmod(place, 1 << PLACE_BITS)
                run, place = told.forwards[one], place + 1
                request = run.batch.requests[number]
                try:
                    ledger.finalise(request, told.step, run.committed[number] if request.in_the_air else None)
                except PageStateError:
                    self._coverage.skip("pages that should be final and were not written", 1)
                place = ledger.steps.land_runs(told.snapshot.cards, place)
        finally:
            ledger.tell_landed(told.step)

    def harvest(self, told: Told) -> list[Hit | HitBatch]:
        """Hits and gaps of the step."""
        harvest = self.bank.harvest(told.snapshot, told.step)
        for substep, _ in told.snapshot.once:
            self._singles.give(substep)
        for hit in harvest.hits:
            self.listener.noticed(hit)
        rows, entries, reads = harvest.runs
        self._cover(rows > 0 and not told.launches, entries, reads, entries > 0)
        hits: list[Hit | HitBatch] = [*judge_read_rows(self._ledger, harvest.rows, told.step)]
        with torch.inference_mode() if harvest.hits else nullcontext():
            runs = told.forwards if harvest.hits else []
            hits += [named for hit in harvest.hits for named in self._named(self._hit(hit, runs))]
        return hits + [self._gap(gap, told.step) for gap in harvest.gaps]

    def count_quiet(self) -> None:
        """What has run in steps that `land_quiet` has landed goes into the coverage."""
        if self._hearing is not None:
            said = self._hearing.said
            self._cover(*said[SAID.forwards : SAID.size])
            for number in range(SAID.forwards, SAID.size):
                said[number] = 0

    def _cover(self, forwards: int, entries: int, reads: int, writers: int) -> None:
        """Steps of so many forwards have written and read entries; `writers`: those of them that wrote some."""
        self._coverage.forwards += forwards
        self._coverage.slots_sealed += entries
        self._coverage.slots_checked += reads
        self._coverage.unproved_stores += writers

    def _named(self, hit: Hit) -> list[Hit]:
        """R9 as a look at the slot finds it: layers that differ, or R3; as it is where nothing differs any more."""
        request = None if hit.request_id is None else self._ledger.requests.get(hit.request_id)
        if hit.code != "R9" or hit.position is None or request is None:
            return [hit]
        queue = request.reads[hit.pool.pool_id]
        queue.extend_to(request.final_len(hit.pool.pool_id), request.commit_step)
        read = queue.last_look(hit.position)
        columns = ([value] for value in (hit.slot, hit.position, 0))
        slots, positions, rows = (np.array(column, np.int64) for column in columns)
        entries = Entries(slots, positions, rows, [request.request_id], np.array([read]))
        batches = find_changed(hit.pool, slots, lambda: entries, hit.site, hit.step, both_lanes=False)
        found = [batch.hit(0) for batch in batches if len(batch)]
        for one in found:
            one.others = hit.others
        return found or [hit]

    def _hit(self, hit: CapturedHit, runs: Sequence[Launched]) -> Hit:
        pool = self._state.by_name[hit.pool]
        position = hit.place if hit.place >= 0 else None
        name = self._ledger.name(hit.uid) if hit.uid >= 0 else None
        others = tuple(other for uid in hit.others if (other := self._ledger.name(uid)) is not None)
        own = hit.code, pool, hit.slot, position, name, hit.site, hit.step
        return Hit(*own, lineage=lineage_of(hit, runs), is_captured=True, others=others)

    def _gap(self, gap: CoverageGap, step: int) -> Hit:
        expected = {"rows": gap.planned_rows, "entries": gap.planned_entries, "reads": gap.planned_reads}
        found = {"rows": gap.run_rows, "entries": gap.run_entries, "reads": gap.run_reads}
        pool = self._state.by_name[gap.pool]
        return Hit("H1", pool, -1, None, None, gap.site, step, expected=expected, found=found)
