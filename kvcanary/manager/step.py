"""StepChecks: everything that is judged between two checks of the engine, at once and in the order of its run."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.entries import Entries, join_entries, written_entries
from kvcanary.calls.forward import Drafted, Forward, Ints, on_host
from kvcanary.calls.set_aside import Excluded
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch, ViolationGroup, ViolationLog
from kvcanary.captured.in_flight import InFlight, Marks
from kvcanary.captured.launch_group import Launched
from kvcanary.captured.moves import DESTINATIONS
from kvcanary.captured.step import CapturedStep, SentStep
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.checks.content import find_changed
from kvcanary.checks.fast_path import Prover, Unproved
from kvcanary.checks.lengths import (
    expect_growth,
    judge_collected,
    judge_commit,
    judge_lengths,
    judge_mask,
    judge_starts,
)
from kvcanary.checks.row_spans import read_entries, sort_rows
from kvcanary.checks.rows import Reader, Verdict
from kvcanary.checks.seals import Sealer
from kvcanary.checks.stores import expect_values, keep_fingerprints
from kvcanary.checks.tokens import Oracle, judge_tokens
from kvcanary.checks.writes import judge_layers
from kvcanary.config import CanaryConfig
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.requests import Batch
from kvcanary.native.layout import LEFT_TO_LEDGER, NOT_WRITTEN, PAGES_FINAL
from kvcanary.pools.slot_maps import slots_in
from kvcanary.records.fingerprints import joined, slots_are_right
from kvcanary.records.mailbox import MAX_IN_FLIGHT
from kvcanary.records.record_store import Move, RecordStore
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.prefix_cache import PrefixScrubber
from kvcanary.scrub.rereads import Rereads
from kvcanary.scrub.scrubber import Scrubber
from kvcanary.scrub.unwritten_tails import UnwrittenTails
from kvcanary.scrub.window_eviction import WindowEviction
from kvcanary.transfers.moves import Mover
from kvcanary.transfers.snapshots import PageSnapshot, PageSnapshots


class Rewritten(NamedTuple):
    """Slots of a pool, [n] int64, whose bytes are no longer those that pending forwards have read."""

    pool: PoolState
    slots: Ints


class StepChecks:
    """What waits to be judged, and what fired.

    violations:   checks that fired since somebody took them
    oracle: who knows tokens that the host does not know yet; None: nobody
    step:   the one that runs;  rereads: bytes that are being read again;  is_full: all that a forward reads is compared
    judged: is given the forwards of a pool when they have been judged;  proved: of those that a loop proved clean
    landing: is given the step whose violations come now, None: those of the one that runs
    publish_pages: what has happened to pages since the last time is true on the device before anything is judged
    """

    def __init__(
        self, state: CanaryState, ledger: Ledger, config: CanaryConfig, coverage: Coverage, excluded: Excluded
    ) -> None:
        self._state, self._ledger, self._config, self._coverage = state, ledger, config, coverage
        self.record_store = RecordStore(state)
        self._sealer = Sealer(self.record_store, ledger)
        self._prover = Prover(state, ledger, self.record_store, self._sealer)
        self._reader = Reader(state, ledger, self.record_store, config.disable)
        compares_content = "R9" not in config.disable
        self._rereads_bytes = config.content != "write" and compares_content
        self.is_full = config.content == "full" and compares_content
        moves = config.content != "write" and "T1" not in config.disable
        self._mover = Mover(state, self.record_store, ledger, moves, reports_sources=compares_content)
        self._snapshots = PageSnapshots(state, self.record_store, ledger, compares_content=moves)
        self.expect_own = self._snapshots.expect_own
        self._pending: list[Forward] = []
        self._drafted: dict[int, Drafted] = {}  # by pool, the last one
        self._window_eviction = WindowEviction(state, ledger, self.record_store, coverage)
        self.publish_pages = partial(state.publish, ledger.pages)
        self._marks = Marks(state.records.device)
        self.rereads = Rereads(state.records.device, at_once=state.records.device.type == "cpu")
        self.tails = UnwrittenTails(state, ledger, self.record_store, config, coverage, self.rereads)
        self.scrubber = Scrubber(state, ledger, config.budget, self.rereads)
        self.cached = PrefixScrubber(state, ledger, self.rereads, is_on=self._rereads_bytes)
        self.violations = ViolationLog(config.disable, excluded.judged if config.mode != "raise" else None)
        self.oracle: Oracle | None = None
        self.judged: Callable[[Sequence[Forward], Verdict], None] = _nobody
        self.proved: Callable[[Sequence[Forward]], None] = _nobody
        self.collecting: Callable[[int | None], None] = lambda step: None
        self.captured: CapturedStep | None = None
        self._flights: deque[InFlight] = deque()
        self.step = 0

    def prepare(self) -> None:
        """No later step waits for kernels that look at bytes: a GPU compiles and loads what is launched first."""
        if not self._rereads_bytes:
            return
        with torch.inference_mode():
            for pool in self._state.pools:
                self.rereads.prepare(pool)

    def open(self, forward: Forward) -> None:
        """From now on it waits to be judged; only under content=full somebody compares a draft's bytes."""
        self._pending.append(forward)
        if forward.kind == "draft":
            self._follow(forward)
        if forward.num_entries and (forward.kind != "draft" or self._config.content == "full"):
            expect_values(forward)

    def _follow(self, forward: Forward) -> None:
        """A draft forward goes on from the last one of its pool, and the next one from it."""
        last = self._drafted.get(forward.pool.pool_id)
        if last is not None:
            forward.go_on_from(last)
        if forward.has_lineage and forward.chains_before is None:
            self._coverage.skip("lineages of draft rows, without the draft forward before", forward.num_rows)
        self._drafted[forward.pool.pool_id] = forward.drafted

    def judge_pending(self, rewritten: Rewritten | None = None) -> None:
        """Seal and judge all pending forwards; `rewritten`: what a declared move has put other bytes into since."""
        self.collect()
        if not self._pending:
            self.record_store.flush()
            return
        forwards, self._pending = self._pending, []
        self.publish_pages()
        left = Unproved.ALL if self.oracle is not None else self._prover.prove(forwards, self.violations)
        if left is Unproved.NOTHING and not self.is_full:
            self.proved(forwards)
        else:
            with torch.inference_mode():
                self._judge_all(forwards, rewritten, left)
        self._count(forwards)

    def _judge_all(self, forwards: list[Forward], rewritten: Rewritten | None, left: Unproved) -> None:
        """What the loop has left to the rules."""
        if left is Unproved.ALL:
            self.violations += self._judge_plans(forwards)
        for pool in self._state.pools:
            own = [forward for forward in forwards if forward.pool is pool]
            if own:
                self._judge(pool, own, rewritten, left is Unproved.NOTHING)

    def flush_before_launch(self) -> None:
        """A captured forward reads what the host sealed and what is true of pages: both are on the device first."""
        if self._pending:
            self.judge_pending()
        if self.record_store.fresh:
            self.record_store.flush()
        if self._ledger.pages.changed:
            self.publish_pages()

    def send(self, is_waited_for: bool) -> InFlight:
        """What this step has launched, with its slice of the rolling check; nobody waits.

        is_waited_for: the host will have waited for all of it but re-reads, by itself, before somebody asks for it
        """
        batch, violations = self._check_tails(self.step)
        return self._send(violations, is_waited_for, batch)

    def has_nothing_there(self, flight: InFlight) -> bool:
        """Whether a device has nothing to say of a flight or of one before it, so that it may land at once."""
        is_alone = len(self._flights) == 1 and (flight.sent is None or not flight.sent.launches)
        return is_alone and not self._state.judges_on_device

    def collect(self, last: InFlight | None = None) -> None:
        """Judge captured forwards and re-reads up to this flight (None: all); waits for their copies.

        What forwards wrote, the host learns before it seals anything else. The longest in flight comes first, and
        where somebody interrupts the host as it waits it stays there.
        """
        captured, flights = self.captured, self._flights
        if last is None and (self.rereads.waits or (captured is not None and (captured.launched or captured.moves))):
            self._send_all()
        while flights and (last is None or not last.is_collected):
            flight = flights[0]
            if flight.over is not None or not flight.is_over:
                self._marks.wait(flight)
            flights.popleft()
            violations, sent, proves = flight.violations, flight.sent, self.oracle is None
            if (
                captured is not None
                and sent is not None
                and (self.is_full or not captured.collect_quiet(sent, self.record_store, proves))
            ):
                self._learn(captured, sent, violations, proves)
            if flight.rereads is not None:
                violations += flight.rereads.violations()
            flight.is_collected = True
            if violations:
                self.collecting(flight.step)
                self.violations += violations
                self.collecting(None)

    def begin_step(self, step: int) -> None:
        """This one runs. What its forwards would overwrite is judged first, be steps between them without any."""
        self.step, captured, flights = step, self.captured, self._flights
        if captured is not None:
            while flights and flights[0].turn < captured.registry.turn + 1 - MAX_IN_FLIGHT:
                self.collect(flights[0])
            captured.registry.begin_step(step)

    @property
    def compares_moves(self) -> bool:
        """Whether bytes are compared where they have arrived."""
        return self._mover.compares_content

    @property
    def waits(self) -> bool:
        """Whether the host has forwards to judge."""
        return bool(self._pending)

    def in_flight(self) -> Iterator[Launched]:
        """Captured forwards that the host has not collected."""
        for flight in self._flights:
            if flight.sent is not None:
                yield from flight.sent.forwards

    def _send_all(self) -> None:
        """With re-reads that run beside; the host is about to wait for them."""
        self.rereads.side_stream.join()
        self._send([])

    def _send(
        self, violations: list[Violation | ViolationBatch], is_waited_for: bool = False, batch: Batch | None = None
    ) -> InFlight:
        """`violations`: of this step, known already; `batch`: bytes of these requests are read beside what comes
        next.
        """
        if len(self._flights) == MAX_IN_FLIGHT:
            self.collect(self._flights[0])
        captured = self.captured
        if captured is not None:
            violations = [*captured.judge_lacking(self.step), *violations]
        if captured is None:
            flight = InFlight(self.step, None, violations)
        else:
            flight = InFlight(self.step, captured.send(self.step), violations, captured.registry.turn)
        self._flights.append(flight)
        if batch is not None:
            with self.rereads.side_stream.behind():
                flight.violations = self._read_slice(self.step, batch) + violations
                flight.rereads, flight.over = self.rereads.send(), self._marks.take()
            return flight
        if self.rereads.waits or not is_waited_for:
            flight.rereads, flight.over = self.rereads.send(), self._marks.take()
        return flight

    def _learn(
        self, captured: CapturedStep, sent: SentStep, violations: list[Violation | ViolationBatch], proves: bool
    ) -> None:
        """What `collect_quiet` has left of a step whose forwards have judged themselves; what fired joins the
        violations.
        """
        for forward in captured.learn(sent, self.record_store, self.unwritten, proves):
            violations += judge_tokens(forward, self.oracle)
            violations += judge_mask(forward)
        captured.learn_moves(sent, self.record_store)
        violations += captured.read_back(sent)
        if self.is_full:
            self._mark_read(sent)
        captured.finalise(sent)
        for run in sent.moves:
            if run.differs:
                with torch.inference_mode():
                    violations += self._mover.arrived(run.move.pool, run.entries[DESTINATIONS], sent.step)

    def _mark_read(self, sent: SentStep) -> None:
        """What attention has compared; several forwards of a step read the same rows."""
        runs = [run for run in sent.forwards if run.substep.judges_bytes]
        rows = [(run.substep.pool, request) for run in runs for request in run.batch.requests]
        for pool, request in {(pool.pool_id, request.uid): (pool, request) for pool, request in rows}.values():
            self._coverage.bytes_checked += self.scrubber.mark_read(pool, request, sent.step)

    def commit(self, batch: Batch, lens: array[int], step: int) -> None:
        """Entries [0, committed length) of these rows are final since this step.

        LifetimeError where a row shrinks: nothing has happened then.
        """
        ledger = self._ledger
        if self._pending:
            self._judge_rows_of(batch.requests)
        found = ledger.steps.commit_rows(batch, lens, step, is_judged=False)
        if not found:
            return
        if found == LEFT_TO_LEDGER:
            expect_growth(batch.requests, lens)
            self.violations += judge_collected(batch.requests, self._state.pools[0], lens, step)
            found = ledger.steps.commit_rows(batch, lens, step, is_judged=True)
        if found & NOT_WRITTEN:
            self.unwritten(batch.requests, step)
        if found & PAGES_FINAL:
            for request in batch.requests:
                if not request.in_flight:
                    ledger.finalise(request, step)

    def unwritten(self, requests: Sequence[Request], step: int) -> None:
        """Of some of these, entries became final in a step that nobody has written."""
        self.violations += judge_commit(requests, self._state.pools, step)

    def judge_writes_into(self, pages: Sequence[int]) -> None:
        """A pending write belongs to the grant of its time: seal it before its page is granted anew."""
        if not self._pending:
            return
        granted = set(pages)
        if not all(granted.isdisjoint(forward.pages) for forward in self._pending):
            self.judge_pending()

    def _judge_rows_of(self, requests: Sequence[Request]) -> None:
        """How far their rows are written is told by the forwards that have run, judged or not."""
        uids = {request.uid for request in requests}
        if any(request.uid in uids for forward in self._pending for request in forward.requests):
            self.judge_pending()

    def _check_tails(self, step: int) -> tuple[Batch | None, list[Violation | ViolationBatch]]:
        """The running requests, where a slice of their bytes is due, and what is known of tails at once.

        Under `full` it comes to the rows that nobody steps. Tails come first, for the next forward may write there.
        """
        scrubber, tails = self.scrubber, self.tails
        is_due = not step % scrubber.stride or scrubber.hurried  # after a finding, too
        if not (is_due or tails.has_new_pages or self.is_full) or not self._rereads_bytes:
            return None, []
        batch = scrubber.batch() if is_due or self.is_full else None
        violations = tails.reread(step, scrubber.stride, batch, scrubber.hurried)
        return batch if is_due else None, violations

    def _read_slice(self, step: int, batch: Batch) -> list[Violation | ViolationBatch]:
        return [*self.scrubber.slice(step, batch), *self.cached.slice(step, self.scrubber.stride)]

    def read_all(self, substeps: Sequence[CapturedSubstep], requests: Sequence[Request], step: int) -> None:
        """content=full: the bytes of these rows are compared in this step, by attention or by the step's slice."""
        if all(substep.judges_bytes for substep in substeps):
            self.scrubber.attend(substeps[0].pool, requests, step)
        else:
            self.scrubber.reread_soon([request.request_id for request in requests])

    def reread_soon(self, groups: Sequence[ViolationGroup]) -> None:
        """Damage has neighbours: every request that holds one of these pages, or the next, is read whole at once."""
        if not self._rereads_bytes:
            return
        near = {violation.page + step for group in groups for violation in group.kept for step in (-1, 0, 1)}
        pages = {page for page in near if page >= 0}
        requests = self._ledger.requests.items()
        self.scrubber.reread_soon(name for name, request in requests if not pages.isdisjoint(request.pages))

    def reread_request(self, request: Request, step: int) -> None:
        """All committed bytes of a request that ends."""
        self.judge_pending()
        if self._rereads_bytes:
            with torch.inference_mode():
                self.violations += self.scrubber.reread_all(request, step)
                self.violations += self.tails.reread_all(request, step)
            self.collect()  # what a GPU says of them, before the request is gone

    def move(self, source: PoolState, pool: PoolState, src: Ints, dst: Ints, step: int, guesses: bool) -> None:
        """Records follow bytes; what a slot map sends nowhere has none."""
        has_fingerprints = not guesses or self._config.content == "full"
        src, dst = np.ascontiguousarray(src), np.ascontiguousarray(dst)
        move = Move(slots_in(source.view, src), slots_in(pool.view, dst), src, dst)
        if self._pending:
            move = move.of_entries(source, pool)
        self.judge_pending(Rewritten(pool, move.dst))
        self.violations += self._mover.apply(source, pool, move, step, has_fingerprints, lengthens=not guesses)

    def pack(self, pages: Sequence[int], step: int, group: str | None = None) -> PageSnapshot:
        """What is known of pages whose bytes leave, in all pools or in those of a group."""
        self.judge_pending()
        with torch.inference_mode():
            return self._snapshots.pack(pages, step, group)

    def unpack(
        self, how: str, snapshot: PageSnapshot, request: Request, pages: Sequence[int], length: int, step: int
    ) -> None:
        """Bytes are back, and their records follow; nothing waits to be judged. `how`: what brought them, in one
        word.
        """
        with torch.inference_mode():
            self.publish_pages()
            self.violations += self._snapshots.unpack(how, snapshot, request, pages, length, step)

    def expect_load(self, pages: Iterable[int]) -> None:
        """Bytes will come into these granted pages, for which their poison vouches."""
        self._snapshots.poisoned.update(pages)

    def unpack_group(self, group: str, snapshots: Sequence[PageSnapshot], pages: Sequence[int], step: int) -> None:
        """As `unpack`, for pages of a group that have kept their grants."""
        with torch.inference_mode():
            self.publish_pages()
            self.violations += self._snapshots.unpack_group(group, snapshots, pages, step)

    def reread_pages(self, pages: Sequence[int], step: int) -> None:
        """All bytes of these pages, which no row names."""
        if self._rereads_bytes:
            with torch.inference_mode():
                self.violations += self.cached.reread(pages, step)

    def enter(self, group: str, own_pages: Sequence[int]) -> None:
        """A group behind a slot map has granted pages of its own."""
        self._window_eviction.enter(group, own_pages)

    def reread_leaving(self, group: str, pages: Sequence[int], step: int) -> bool:
        """Final bytes on these full pages in a group behind a slot map, which gives them up; whether a check fired.

        Nothing waits to be judged.
        """
        self._snapshots.left.leave(group, pages)
        if not self._rereads_bytes or not len(pages):
            return False
        with torch.inference_mode():
            violations = self._window_eviction.reread(group, pages, step)
        self.violations += violations
        return bool(violations)

    def report(self, violations: Sequence[Violation | ViolationBatch]) -> None:
        if violations:
            self.violations += violations

    def forget(self, pages: Sequence[int]) -> None:
        """What was judged on these pages is judged anew, should the row go on."""
        size = self._state.page_size
        for pool in self._state.pools:
            if pool.is_partial:
                continue  # judged in every forward
            for page in pages:
                first = pool.base + page * size
                self.record_store.judged[first : first + size] = False

    def _judge_plans(self, forwards: Sequence[Forward]) -> list[Violation | ViolationBatch]:
        """What forwards planned and stored, rule by rule; then all of it is sealed."""
        violations: list[Violation | ViolationBatch] = []
        for forward in forwards:
            forward.read_rows()
            violations += judge_layers(forward)
            violations += judge_tokens(forward, self.oracle)
            violations += judge_mask(forward)
        violations += self._sealer.seal(forwards)
        self.record_store.flush()
        for forward in forwards:
            keep_fingerprints(forward)
            violations += judge_lengths(forward)
            violations += judge_starts(forward)
            self._write_rows(forward)
        return violations

    def _write_rows(self, forward: Forward) -> None:
        """How far each row of the pool has been written by a forward that is no guess."""
        lens, written = array("q", forward.prefixes), array("q", forward.written[:: forward.width])
        self._ledger.steps.write_rows(Batch(forward.requests), forward.kind, forward.pool.pool_id, lens, written)

    def _judge(self, pool: PoolState, forwards: Sequence[Forward], rewritten: Rewritten | None, is_clean: bool) -> None:
        """What forwards of one pool have read; `is_clean`: the identity of all that was proved."""
        for forward in forwards:
            forward.read_rows()
        verdict = Verdict([], sort_rows(forwards).segments, [], 0) if is_clean else self._reader.judge(pool, forwards)
        if self.is_full:
            verdict.violations += self._check_all_bytes(pool, forwards, verdict, rewritten)
        self.violations += verdict.violations
        self.judged(forwards, verdict)
        self._coverage.skip("truth not known to the host", verdict.unknown_truths)

    def _count(self, forwards: Sequence[Forward]) -> None:
        coverage = self._coverage
        coverage.forwards += len(forwards)
        for forward in forwards:
            coverage.slots_checked += forward.num_reads
            if not forward.is_usable and forward.short_rows:
                short = sum(forward.bounds[row + 1] - forward.bounds[row] for row in forward.short_rows)
                coverage.slots_checked -= short
                coverage.skip("entries of rows that are too short", short)
            if forward.num_entries:
                coverage.slots_sealed += forward.num_entries
                coverage.unproved_stores += not forward.is_proved
            if forward.pool.view.window is not None:
                coverage.slots_checked -= sum(forward.skipped)

    def _check_all_bytes(
        self, pool: PoolState, forwards: Sequence[Forward], verdict: Verdict, rewritten: Rewritten | None
    ) -> list[ViolationBatch]:
        """content=full: every byte that these forwards have read or written, and that is still there."""
        slots = joined([self._reader.slots(verdict.segments), *(forward.pool_slots for forward in forwards)])
        kept: slice | Ints = slice(None)
        if rewritten is not None and rewritten.pool is pool:
            kept = own = np.flatnonzero(~np.isin(on_host(slots), rewritten.slots))
            self._coverage.skip("entries rewritten by a move before their bytes were read", len(slots) - len(own))
            slots = slots[torch.from_numpy(own).to(slots.device)]
        self._coverage.bytes_checked += len(slots) * pool.view.slot_bytes
        violations: list[ViolationBatch] = []
        if not slots_are_right(pool, slots):
            last = forwards[-1]
            violations = find_changed(
                pool,
                on_host(slots),
                lambda: self._entries_of(forwards, verdict).at(kept),
                last.site,
                last.step,
                both_fingerprints=False,
            )
        step = forwards[-1].step
        for request in {request.uid: request for forward in forwards for request in forward.requests}.values():
            self.scrubber.mark_read(pool, request, step)
        return violations

    def _entries_of(self, forwards: Sequence[Forward], verdict: Verdict) -> Entries:
        """What is known of every slot that was read, then of every slot that was written."""
        written = [written_entries(forward) for forward in forwards]
        if not verdict.segments:
            return join_entries(written)
        pool = forwards[0].pool
        read = read_entries(pool, verdict.segments)
        queues = [self._ledger.request(name).reads[pool.pool_id] for name in read.request_ids]
        last_reads = [-1 if (step := queue.oldest()) is None else step for queue in queues]
        read.last_good = np.array(last_reads)[read.rows]  # of the bytes: identity is good to this very step
        return join_entries([read, *written])


def _nobody(forwards: Sequence[Forward], verdict: Verdict | None = None) -> None:
    """Who is called where nobody asked to be."""
