"""Graphs: the manager's static substeps, what the host learns of their writes, and their harvest as findings."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from operator import add
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvcanary.bank import Snapshot, SubstepBank
from kvcanary.captured_move import StaticMove
from kvcanary.cards import (
    LEFT_TO_RULES,
    LINE_BITS,
    ROW_CHAINS,
    ROW_LENGTHS,
    ROW_NUMBERS,
    ROW_ROOTS,
    ROW_UIDS,
    ROW_UNHEARD,
    UNKNOWN,
)
from kvcanary.certificate import Coverage
from kvcanary.content import find_changed
from kvcanary.entries import Entries
from kvcanary.errors import PageStateError
from kvcanary.forward import Ints
from kvcanary.harvest import CoverageGap, Ran, StaticHit
from kvcanary.hearing import Hearing
from kvcanary.hits import Hit
from kvcanary.known import rows_at
from kvcanary.learning import Heard, Launched, Learned
from kvcanary.ledger import Ledger, Request
from kvcanary.mirror import Mirror
from kvcanary.once import OnceSubstep, Singles
from kvcanary.outbox import Line, to_device
from kvcanary.requests import CARD, COMMITTED, HEARD_LEN, TOKENS, UNHEARD, UNLANDED, Unheard, final_lens
from kvcanary.seats import StaticAcceptance
from kvcanary.state import CanaryState, PoolState
from kvcanary.static import HEADER_PART, StaticSubstep
from kvcanary.truths import is_guess, note_rows
from kvcanary.views import ReadPlan, WritePlan
from kvcanary_kernels.settle import NUM_RUNS, RUN_READ, RUN_WRITTEN

Commit = Callable[[Sequence[Request], Sequence[int], int], None]


class RowTruth:
    """What the host knows of the rows that a captured forward is launched with, by request.

    step:        the step's number and turn, as `SubstepBank.step` has them, for forwards with a step of their own
    numbers:     [5, requests] int64, all that follows in this order
    uids:        of the requests
    prefix_lens: final entries of their rows; UNKNOWN (-1) where a token of these is not known to the host yet
    truths:      chain value at that length, as int64
    roots:       chain value that position 0 continues, as int64
    unheard:     1 where the row goes on by what the last step has accepted, which the device alone knows (`Seats`): the
                 length and chain value are those of all entries whose tokens the host knows. Else 0
    """

    __slots__ = ("numbers", "step")

    def __init__(self, numbers: Ints, step: int) -> None:
        self.numbers, self.step = numbers, step

    @property
    def uids(self) -> list[int]:
        return self.numbers[ROW_UIDS].tolist()

    @property
    def prefix_lens(self) -> list[int]:
        return self.numbers[ROW_LENGTHS].tolist()

    @property
    def truths(self) -> list[int]:
        return self.numbers[ROW_CHAINS].tolist()

    @property
    def roots(self) -> list[int]:
        return self.numbers[ROW_ROOTS].tolist()

    @property
    def unheard(self) -> list[int]:
        return self.numbers[ROW_UNHEARD].tolist()


class Listener(Protocol):
    """Who keeps what the host learns of captured forwards."""

    def learned(self, forward: Learned, layers: Sequence[int]) -> None:
        """The first of its site and step of which nothing was told; `layers`: that it stored, in their order."""

    def heard(self, forward: Heard, layers: Sequence[int]) -> None:
        """The same of one that was proved clean."""

    def moved(self, src: Ints, dst: Ints) -> None:
        """The first launched move of which nothing was told."""

    def noticed(self, hit: StaticHit) -> None:
        """A check on the device fired."""


class Run(NamedTuple):
    """A captured forward that has run, and what the device says of it.

    line: as `StaticSubstep.written` tells it;  accepted: [size, 1 + places], before it ran
    """

    launched: Launched
    line: Line
    accepted: Ints | None


class Told(NamedTuple):
    """What the device says of one step: there when the flight's copies are over.

    moves: as `StaticMove.moved` tells them, and in which turn they were launched
    """

    step: int
    forwards: list[Run]
    moves: list[tuple[StaticMove, int, list[Ints]]]
    snapshot: Snapshot


class StaticChecks:
    """Substeps that are captured or replayed: they judge on the device, and the host reads what fired once a step.

    launched, moves: forwards and moves that no `send` has taken along
    listener:        who is told what was learned of them, and of every hit
    """

    def __init__(self, state: CanaryState, ledger: Ledger, coverage: Coverage, listener: Listener) -> None:
        self._state, self._ledger, self._coverage, self.listener = state, ledger, coverage, listener
        self.bank = SubstepBank(state)
        self.bank.publish = partial(state.publish, ledger.pages)
        self._singles = Singles(self.bank.shared)
        self._hearing: Hearing | None = None
        self.launched: list[Launched] = []
        self.moves: list[StaticMove] = []

    def launch(
        self,
        substeps: Sequence[StaticSubstep],
        requests: list[Request],
        step: int,
        written: Sequence[int] | None,
        reads: Sequence[int],
        acceptance: StaticAcceptance | None = None,
    ) -> RowTruth:
        """These requests are the live rows of forwards of one kind and pool that run next, one behind the other.

        written: by request, entries that each of its rows writes in each; None: as many as `acceptance` says, which
        runs before them. reads: by forward, as the engine knows the lengths of rows
        """
        rows, entries, plan = len(requests), 0 if written is None else sum(written), self.bank.plan
        for substep, count in zip(substeps, reads, strict=True):
            plan(substep, rows * substep.width, entries * substep.width, count)
        lengths = self._known_lens(requests, substeps[0].pool)
        cards = array("q", map(CARD, requests))
        truth = self._truth(substeps[0].pool.pool_id, requests, cards, lengths, len(substeps))
        if acceptance is not None:
            acceptance.told.expect(self.bank.turn)
            for request in requests:
                request.unlanded += 1
        self._note(substeps, requests, cards, lengths, step, written, acceptance)
        return truth

    def launch_once(
        self,
        pool: PoolState,
        site: tuple[str, int],
        read: ReadPlan,
        write: WritePlan,
        requests: list[Request],
        step: int,
        written: list[int],
    ) -> OnceSubstep:
        """The same for a forward that comes once, as an engine's own tensors describe it."""
        lengths = self._known_lens(requests, pool)
        cards = array("q", map(CARD, requests))
        truth = self._truth(pool.pool_id, requests, cards, lengths)
        substep = self._singles.take(pool, site, read, write, written, truth)
        self._note([substep], requests, cards, lengths, step, written, None)
        return substep

    def _truth(
        self, pool_id: int, requests: Sequence[Request], cards: array[int], lengths: list[int], num_forwards: int = 1
    ) -> RowTruth:
        """`cards`: of the requests."""
        rows, unknown = rows_at(cards, pool_id, lengths, list(map(UNLANDED, requests)))
        if unknown:
            self._coverage.skip("truth not known to the host", num_forwards * unknown)
        return RowTruth(np.frombuffer(rows, np.int64).reshape(ROW_NUMBERS, -1), self.bank.now)

    def _known_lens(self, requests: Sequence[Request], pool: PoolState) -> list[int]:
        """Entries whose tokens the host knows, of rows that may go on by what one step has accepted behind them."""
        lengths = final_lens(requests, pool.pool_id)
        if not any(map(UNLANDED, requests)):
            return lengths
        offset, ahead, most = pool.view.token_offset, pool.view.ahead, 0 if self.bank.seats is None else 1
        rows = zip(lengths, map(UNLANDED, requests), map(COMMITTED, requests), map(TOKENS, requests), strict=True)
        return [
            length
            if not unlanded
            else len(tokens) - offset
            if unlanded <= most and len(tokens) == committed_len + 1 and length == committed_len + ahead
            else UNKNOWN
            for length, unlanded, committed_len, tokens in rows
        ]

    def _note(
        self,
        substeps: Sequence[StaticSubstep],
        requests: list[Request],
        cards: array[int],
        lengths: Sequence[int],
        step: int,
        written: Sequence[int] | None,
        acceptance: StaticAcceptance | None,
    ) -> None:
        """They run next, over rows of these lengths."""
        committed = list(map(COMMITTED, requests))
        is_behind = acceptance is not None or any(map(UNHEARD, requests)) or any(map(UNLANDED, requests))
        heard = sum(map(HEARD_LEN, requests)) if is_behind else None
        for substep in substeps:
            substep.written.expect(self.bank.turn)
            run = Launched(substep, requests, committed, step, self.bank.turn, cards, heard, written, acceptance)
            self.launched.append(run)
        num_forwards = len(substeps)
        for request in requests:
            request.in_the_air += num_forwards
        if not is_behind and written is not None:
            _note_rows(substeps[0], requests, lengths, written)

    def launch_move(self, move: StaticMove) -> None:
        """This move runs next."""
        move.moved.expect(self.bank.turn)
        self.moves.append(move)

    def send(self, step: int) -> Told:
        """What has run since the last time is on its way to the host."""
        launched, self.launched = self.launched, [run for run in self.launched if run.substep.is_open]
        launched = [run for run in launched if not run.substep.is_open]
        moves, self.moves = self.moves, []
        forwards = [Run(run, run.substep.written.line(), _accepted(run)) for run in launched]
        runs, singles = dict[int, Ran](), list[tuple[OnceSubstep, Ints]]()
        for run, line, _ in forwards:
            if isinstance(run.substep, OnceSubstep):
                singles.append((run.substep, line[HEADER_PART]))
            elif (number := run.substep.number) is not None:
                runs[number] = Ran(run.turn, line, run.requests)
        snapshot = self.bank.snapshot(runs or None, singles)
        return Told(step, forwards, [(move, move.moved.turn, move.moved.read()) for move in moves], snapshot)

    def learn(self, told: Told, mirror: Mirror, commit: Commit, proves: bool) -> Iterator[Learned]:
        """Forwards for the rules, in the order of their run; pages are written, and the mirror knows where new records
        lie. Copies are over.

        commit: entries of requests up to a length each became final in a step
        proves: a forward that a loop finds clean is not left to the rules
        """
        num_learned, hearing = 0, self._hearing
        if hearing is None:
            hearing = self._hearing = Hearing(self._ledger.pages, mirror)
        for run, line, accepted in told.forwards:
            has_run = run.substep.written.has_run(run.turn)
            tokens = None if accepted is None else _tokens(run, accepted) if has_run else [[]] * len(run.requests)
            if run.heard is not None:
                self._settle_counts(told.snapshot, run, tokens, run.heard)
            if tokens is not None:
                self._accept(run, tokens, commit)
            if not has_run:  # H1 says so
                continue
            if run.heard is not None:
                counts = [len(own) for own in tokens or ()] if run.written is None else run.written
                _note_rows(run.substep, run.requests, None, counts)
            substep, number = run.substep, run.substep.number
            if proves and number is not None:
                seen = hearing.hear(number, run, line)
                if not seen & LEFT_TO_RULES:
                    num_learned += 1
                    self.listener.heard(Heard.of(run, line, seen >> LINE_BITS, tokens), substep.layers)
                    continue
            forward = Learned(substep, run.step, len(run.requests), line.parts(), tokens, run.requests)
            if not forward.is_plan:
                self._coverage.skip("captured forwards whose plans contradict themselves", 1)
                continue
            num_learned += 1
            self._ledger.pages.wrote(forward.slots // self._ledger.page_size)
            mirror.learn(forward.slots + forward.pool.base)
            yield forward
            self.listener.learned(forward, substep.layers)
        self._coverage.forwards += num_learned

    def _settle_counts(self, snapshot: Snapshot, run: Launched, tokens: list[list[int]] | None, heard: int) -> None:
        """Rows were longer than the engine knew by what steps before had accepted, which is known by now."""
        substep, behind = run.substep, sum(map(COMMITTED, run.requests)) - heard
        written = 0 if tokens is None else sum(map(len, tokens))
        if substep.number is not None:
            first = substep.number * NUM_RUNS
            snapshot.planned[first + RUN_READ] += (behind + written) * substep.width
            snapshot.planned[first + RUN_WRITTEN] += written * substep.width

    def _accept(self, run: Launched, tokens: list[list[int]], commit: Commit) -> None:
        """The books go on by what the device says was accepted; the engine confirms it when it has heard."""
        live, going, unheard = self._ledger.requests, list[Request](), list[Unheard]()
        for request, own in zip(run.requests, tokens, strict=True):
            request.unlanded -= 1
            if own and live.get(request.request_id) is request:
                going.append(request)
                unheard.append(Unheard(own, request.committed_len, request.committed_len + len(own)))
        self._ledger.append(going, [step.tokens for step in unheard], run.step)
        commit(going, [step.committed_len for step in unheard], run.step)
        for request, step in zip(going, unheard, strict=True):
            request.unheard.append(step)

    def learn_moves(self, told: Told, mirror: Mirror) -> None:
        """Entries that have arrived lengthen rows; after `learn`."""
        for move, turn, (destination, tokens, source, _) in told.moves:
            moved = (destination >= 0) & move.moved.has_run(turn)
            slots: Ints = destination[moved]
            self.listener.moved(source[moved], slots)
            if len(slots):
                mirror.learn(slots + move.pool.base)
                positions = tokens[moved].view(np.uint64) >> 32
                self._ledger.note_moved(move.pool.pool_id, slots, positions.view(np.int64))

    def finalise(self, told: Told) -> None:
        """Pages of what was final when forwards were launched are written no more; after `learn` and its moves.

        A page that no forward has written as planned stays as it is: the device's codes say why.
        """
        ledger = self._ledger
        for _, runs in groupby((run.launched for run in told.forwards), key=_launch_of):
            run, *others = runs
            for request in run.requests:
                request.in_the_air -= 1 + len(others)
            for number in ledger.may_finalise(run.requests):
                request, committed_len = run.requests[number], run.committed[number]
                if ledger.requests.get(request.request_id) is request and request.pages:
                    try:
                        ledger.finalise(request, told.step, committed_len if request.in_the_air else None)
                    except PageStateError:
                        self._coverage.skip("pages that should be final and were not written", 1)

    def harvest(self, told: Told) -> list[Hit]:
        """Hits and gaps of the step."""
        harvest = self.bank.harvest(told.snapshot, told.step)
        for substep, _ in told.snapshot.once:
            self._singles.give(substep)
        for hit in harvest.hits:
            self.listener.noticed(hit)
        rows, entries, reads = harvest.runs
        self._coverage.forwards += rows > 0 and not told.forwards
        self._coverage.slots_checked += reads
        self._coverage.slots_sealed += entries
        self._coverage.unproved_stores += entries > 0
        hits = list[Hit]()
        with torch.inference_mode() if harvest.hits else nullcontext():
            hits += [named for hit in harvest.hits for named in self._named(self._hit(hit))]
        return hits + [self._gap(gap, told.step) for gap in harvest.gaps]

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
        where = to_device(torch.from_numpy(slots), hit.pool.records.device)
        batches = find_changed(hit.pool, where, lambda: entries, hit.site, hit.step, both_lanes=False)
        found = [batch.hit(0) for batch in batches if len(batch)]
        for one in found:
            one.others = hit.others
        return found or [hit]

    def _hit(self, hit: StaticHit) -> Hit:
        pool = self._state.by_name[hit.pool]
        position = hit.place if hit.place >= 0 else None
        name = self._ledger.name(hit.uid) if hit.uid >= 0 else None
        others = tuple(other for uid in hit.others if (other := self._ledger.name(uid)) is not None)
        return Hit(hit.code, pool, hit.slot, position, name, hit.site, hit.step, others=others)

    def _gap(self, gap: CoverageGap, step: int) -> Hit:
        expected = {"rows": gap.planned_rows, "entries": gap.planned_entries, "reads": gap.planned_reads}
        found = {"rows": gap.run_rows, "entries": gap.run_entries, "reads": gap.run_reads}
        pool = self._state.by_name[gap.pool]
        return Hit("H1", pool, -1, None, None, gap.site, step, expected=expected, found=found)


def _note_rows(
    substep: StaticSubstep, requests: Sequence[Request], lengths: Sequence[int] | None, written: Sequence[int]
) -> None:
    """How far the forward writes the rows of its pool, which have these lengths before; None: all that is final."""
    kind, pool_id = substep.site[0], substep.pool.pool_id
    if not is_guess(kind):
        lengths = final_lens(requests, pool_id) if lengths is None else lengths
        note_rows(requests, kind, pool_id, list(map(add, lengths, written)))


def _accepted(run: Launched) -> Ints | None:
    if run.acceptance is None:
        return None
    (numbers,) = run.acceptance.told.read()
    return numbers.reshape(-1, 1 + run.acceptance.places)


def _tokens(run: Launched, accepted: Ints) -> list[list[int]]:
    """By request."""
    return [row[1 : 1 + max(row[0], 0)] for row in accepted[: len(run.requests)].tolist()]


def _launch_of(run: Launched) -> int:
    """The same for forwards that were launched together."""
    return id(run.requests)
