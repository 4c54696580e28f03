"""Graphs: the manager's static substeps, what the host learns of their writes, and their harvest as findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcanary.bank import Snapshot, SubstepBank
from kvcanary.buffers import UNKNOWN
from kvcanary.captured_move import StaticMove
from kvcanary.certificate import Coverage
from kvcanary.errors import PageStateError
from kvcanary.forward import Ints
from kvcanary.harvest import CoverageGap, Ran, StaticHit
from kvcanary.hits import Hit
from kvcanary.learning import Launched, Learned
from kvcanary.ledger import Ledger, Request
from kvcanary.mirror import Mirror
from kvcanary.once import OnceSubstep, Singles
from kvcanary.state import CanaryState, PoolState
from kvcanary.static import ROW_STARTS, VIOLATIONS, StaticSubstep
from kvcanary.truths import note_row
from kvcanary.views import ReadPlan, WritePlan


class RowTruth(NamedTuple):
    """What the host knows of the rows that a captured forward is launched with, by request.

    uids:        of the requests
    prefix_lens: final entries of their rows; UNKNOWN (-1) where a token of these is not known to the host yet
    truths:      chain value at that length, as int64
    roots:       chain value that position 0 continues, as int64
    """

    uids: list[int]
    prefix_lens: list[int]
    truths: list[int]
    roots: list[int]


class Listener(Protocol):
    """Who keeps what the host learns of captured forwards."""

    def learned(self, forward: Learned, layers: Sequence[int]) -> None:
        """The first of its site and step of which nothing was told; `layers`: that it stored, in their order."""

    def moved(self, src: Ints, dst: Ints) -> None:
        """The first launched move of which nothing was told."""

    def noticed(self, hit: StaticHit) -> None:
        """A check on the device fired."""


class Told(NamedTuple):
    """What the device says of one step: there when the flight's copies are over.

    forwards: with what they wrote and the masks of their trees;  moves: with destinations and records' first columns
    """

    step: int
    forwards: list[tuple[Launched, list[Ints], NDArray[np.bool_] | None]]
    moves: list[tuple[StaticMove, list[Ints]]]
    snapshot: Snapshot


class StaticChecks:
    """Substeps that are captured or replayed: they judge on the device, and the host reads what fired once a step.

    launched, moves: forwards and moves that no `send` has taken along
    listener:        who is told what was learned of them, and of every hit
    """

    def __init__(self, state: CanaryState, ledger: Ledger, coverage: Coverage, listener: Listener) -> None:
        self._state, self._ledger, self._coverage, self.listener = state, ledger, coverage, listener
        self.bank = SubstepBank(state)
        self._singles = Singles(self.bank.shared)
        self.launched: list[Launched] = []
        self.moves: list[StaticMove] = []

    def launch(
        self,
        substeps: Sequence[StaticSubstep],
        requests: list[Request],
        step: int,
        written: Sequence[int],
        reads: Sequence[int],
    ) -> RowTruth:
        """These requests are the live rows of forwards of one kind and pool that run next, one behind the other.

        written: by request, entries that each of its rows writes in each; reads: by forward
        """
        for substep, count in zip(substeps, reads, strict=True):
            self.bank.expect(substep, len(requests) * substep.width, sum(written) * substep.width, count)
        lengths = _final_lens(requests, substeps[0].pool.pool_id)
        truth = self._truth(substeps[0].pool.pool_id, requests, lengths, len(substeps))
        self._note(substeps, requests, lengths, step, written)
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
        lengths = _final_lens(requests, pool.pool_id)
        truth = self._truth(pool.pool_id, requests, lengths)
        substep = self._singles.take(pool, site, read, write, written, truth)
        self._note([substep], requests, lengths, step, written)
        return substep

    def _truth(self, pool_id: int, requests: Sequence[Request], lengths: list[int], num_forwards: int = 1) -> RowTruth:
        chains = self._ledger.truths_at(requests, pool_id, lengths)
        if None in chains:
            self._coverage.skip("truth not known to the host", num_forwards * chains.count(None))
            lengths = [UNKNOWN if chain is None else length for chain, length in zip(chains, lengths, strict=True)]
        return RowTruth(
            [request.uid for request in requests],
            lengths,
            [chain or 0 for chain in chains],
            [request.truths[pool_id].signed_root for request in requests],
        )

    def _note(
        self,
        substeps: Sequence[StaticSubstep],
        requests: list[Request],
        lengths: Sequence[int],
        step: int,
        written: Sequence[int],
    ) -> None:
        """They run next, over rows of these lengths."""
        committed = [request.committed_len for request in requests]
        for substep in substeps:
            substep.written.expect(self.bank.turn)
            self.launched.append(Launched(substep, requests, committed, step, self.bank.turn))
        kind, pool_id, num_forwards = substeps[0].site[0], substeps[0].pool.pool_id, len(substeps)
        for request, length, count in zip(requests, lengths, written, strict=True):
            request.in_the_air += num_forwards
            if kind != "draft":
                note_row(request, kind, pool_id, length + count)

    def launch_move(self, move: StaticMove) -> None:
        """This move runs next."""
        move.moved.expect(self.bank.turn)
        self.moves.append(move)

    def send(self, step: int) -> Told:
        """What has run since the last time is on its way to the host."""
        launched, self.launched = self.launched, [run for run in self.launched if run.substep.is_open]
        launched = [run for run in launched if not run.substep.is_open]
        moves, self.moves = self.moves, []
        forwards = [(run, run.substep.written.read(), _masks(run.substep)) for run in launched]
        headers, runs, singles = dict[int, Ints](), dict[int, Ran](), list[tuple[OnceSubstep, Ints]]()
        for run, written, _ in forwards:
            if isinstance(run.substep, OnceSubstep):
                singles.append((run.substep, written[-1]))
            elif (number := run.substep.number) is not None:
                headers[number] = written[-1]
                runs[number] = Ran(run.turn, written[ROW_STARTS], written[VIOLATIONS], run.requests)
        snapshot = self.bank.snapshot(headers or None, runs, singles)
        return Told(step, forwards, [(move, move.moved.read()) for move in moves], snapshot)

    def learn(self, told: Told, mirror: Mirror) -> Iterator[Learned]:
        """Forwards for the rules; pages are written, and the mirror knows where new records lie. Copies are over."""
        num_learned = 0
        for run, written, masks in told.forwards:
            forward = Learned(run, written, masks)
            if not forward.is_plan:
                self._coverage.skip("captured forwards whose plans contradict themselves", 1)
                continue
            num_learned += 1
            self._ledger.pages.wrote(forward.slots // self._ledger.page_size)
            mirror.learn(forward.slots + forward.pool.base)
            self.listener.learned(forward, run.substep.layers)
            yield forward
        self._coverage.forwards += num_learned

    def learn_moves(self, told: Told, mirror: Mirror) -> None:
        """Entries that have arrived lengthen rows; after `learn`."""
        for move, (destination, tokens, source) in told.moves:
            moved = destination >= 0
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
        for run, _, _ in told.forwards:
            for request, committed_len in zip(run.requests, run.committed, strict=True):
                request.in_the_air -= 1
                if not ledger.may_finalise(request):
                    continue
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
        return [self._hit(hit) for hit in harvest.hits] + [self._gap(gap, told.step) for gap in harvest.gaps]

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


def _final_lens(requests: Sequence[Request], pool_id: int) -> list[int]:
    return [request.final_len(pool_id) for request in requests]


def _masks(substep: StaticSubstep) -> NDArray[np.bool_] | None:
    return None if substep.masks is None else substep.masks.send()
