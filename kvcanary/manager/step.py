"""StepChecks: everything that is judged between two checks of the engine, at once and in the order of its run."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.forward import Drafted, Forward
from kvcanary.calls.set_aside import Excluded
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch, ViolationGroup, ViolationLog
from kvcanary.captured.in_flight import InFlight, Marks
from kvcanary.captured.launch_group import Launched
from kvcanary.captured.moves import DESTINATIONS
from kvcanary.captured.states import CapturedStates
from kvcanary.captured.step import CapturedStep, SentStep
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.checks.fast_path import Prover, Unproved
from kvcanary.checks.lengths import expect_growth, judge_collected, judge_commit, judge_mask
from kvcanary.checks.tokens import judge_tokens
from kvcanary.config import CanaryConfig
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.requests import Batch
from kvcanary.manager.rules import Rewritten, Rules
from kvcanary.native.layout import LEFT_TO_LEDGER, NOT_WRITTEN, PAGES_FINAL
from kvcanary.pools.slot_maps import slots_of_pages
from kvcanary.records.mailbox import MAX_IN_FLIGHT
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState
from kvcanary.scrub.prefix_cache import PrefixScrubber
from kvcanary.scrub.rereads import Rereads
from kvcanary.scrub.scrubber import Scrubber
from kvcanary.scrub.unwritten_tails import UnwrittenTails
from kvcanary.scrub.window_eviction import WindowEviction
from kvcanary.transfers.moves import Mover
from kvcanary.transfers.snapshots import PageSnapshot, PageSnapshots


class StepChecks:
    """What waits to be judged, and what fired.

    violations: checks that fired since somebody took them
    step:       the one that runs
    rules:      by which forwards are judged that are not proved clean;  proved: is given those that are
    rereads:    bytes that are being read again;  is_full: all that a forward reads is compared
    collecting: is given the step whose violations come now, None: those of the one that runs
    publish_pages: what has happened to pages since the last time is true on the device before anything is judged
    """

    def __init__(
        self, state: CanaryState, ledger: Ledger, config: CanaryConfig, coverage: Coverage, excluded: Excluded
    ) -> None:
        self._state, self._ledger, self._config, self._coverage = state, ledger, config, coverage
        compares_content = "R9" not in config.disable
        self._rereads_bytes = config.content != "write" and compares_content
        self.violations = ViolationLog(config.disable, excluded.judged if config.mode != "raise" else None)
        self.record_store = record_store = RecordStore(state)
        self.publish_pages = partial(state.publish, ledger.pages)

        self.rereads = Rereads(state.records.device, at_once=state.records.device.type == "cpu")
        self.tails = UnwrittenTails(state, ledger, record_store, config, coverage, self.rereads)
        self.scrubber = Scrubber(state, ledger, config.budget, self.rereads)
        self.cached = PrefixScrubber(state, ledger, self.rereads, is_on=self._rereads_bytes)

        self.rules = Rules(state, ledger, record_store, self.scrubber, coverage, self.violations, config)
        self.is_full = self.rules.is_full
        self._prover = Prover(state, ledger, record_store, self.rules.sealer)
        self.proved: Callable[[Sequence[Forward]], None] = lambda forwards: None
        self._pending: list[Forward] = []
        self._drafted: dict[int, Drafted] = {}  # by pool, the last one

        moves = config.content != "write" and "T1" not in config.disable
        self.mover = Mover(state, record_store, ledger, moves, reports_sources=compares_content)
        self.snapshots = PageSnapshots(state, record_store, ledger, moves, config.model)
        self.window_eviction = WindowEviction(state, ledger, record_store, coverage)

        self.captured: CapturedStep | None = None
        self.captured_states: list[CapturedStates] = []
        self.collecting: Callable[[int | None], None] = lambda step: None
        self._flights: deque[InFlight] = deque()
        self._marks = Marks(state.records.device)
        self.step = 0

    @torch.inference_mode()
    def prepare(self) -> None:
        """No later step waits for kernels that look at bytes: a GPU compiles and loads what is launched first."""
        for pool in self._state.pools if self._rereads_bytes else ():
            self.rereads.prepare(pool)

    def open(self, forward: Forward) -> None:
        """From now on it waits to be judged; only under content=full somebody compares a draft's bytes.

        A draft forward goes on from the last one of its pool.
        """
        self._pending.append(forward)
        if forward.kind == "draft":
            last = self._drafted.get(forward.pool.pool_id)
            if last is not None:
                forward.go_on_from(last)
            if forward.has_lineage and forward.chains_before is None:
                self._coverage.skip("lineages of draft rows, without the draft forward before", forward.num_rows)
            self._drafted[forward.pool.pool_id] = forward.drafted
        if forward.num_entries and (forward.kind != "draft" or self._config.content == "full"):
            forward.expect_values()

    def judge_pending(self, rewritten: Rewritten | None = None) -> None:
        """Seal and judge all pending forwards; `rewritten`: what a declared move has put other bytes into since."""
        self.collect()
        if not self._pending:
            self.record_store.flush()
            return
        forwards, self._pending = self._pending, []
        self.publish_pages()
        left = Unproved.ALL if self.rules.oracle is not None else self._prover.prove(forwards, self.violations)
        if left is Unproved.NOTHING and not self.is_full:
            self.proved(forwards)
        else:
            self.rules.judge(forwards, rewritten, left)
        self._count(forwards)

    def flush_before_launch(self) -> None:
        """A captured forward reads what the host sealed and what is true of pages: both are on the device first."""
        if self._pending:
            self.judge_pending()
        if self.record_store.fresh:
            self.record_store.flush()
        if self._ledger.pages.changed:
            self.publish_pages()

    def send(self, is_waited_for: bool = False, reads_slice: bool = True) -> InFlight:
        """What this step has launched, with its slice of the rolling check; nobody waits.

        is_waited_for: the host will have waited for all of it but re-reads, by itself, before somebody asks for it
        """
        captured, step = self.captured, self.step
        batch, violations = self._check_tails(step) if reads_slice else (None, [])
        if len(self._flights) == MAX_IN_FLIGHT:
            self.collect(self._flights[0])
        if captured is None:
            flight = InFlight(step, None, violations)
        else:
            violations = [*captured.judge_lacking(step), *violations]
            flight = InFlight(step, captured.send(step), violations, captured.registry.turn)
        self._flights.append(flight)
        if batch is not None:  # read beside what comes next
            with self.rereads.side_stream.behind():
                slices = self.scrubber.slice(step, batch), self.cached.slice(step, self.scrubber.stride)
                flight.violations = [*slices[0], *slices[1], *violations]
                flight.rereads, flight.over = self.rereads.send(), self._marks.take()
        elif self.rereads.waits or not is_waited_for:
            flight.rereads, flight.over = self.rereads.send(), self._marks.take()
        return flight

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
            self.rereads.side_stream.join()  # the host is about to wait for them
            self.send(reads_slice=False)
        while flights and (last is None or not last.is_collected):
            flight = flights[0]
            if flight.over is not None or not flight.is_over:
                self._marks.wait(flight)
            flights.popleft()
            violations, sent, proves = flight.violations, flight.sent, self.rules.oracle is None
            if (
                captured is not None
                and sent is not None
                and (self.is_full or not captured.collect_quiet(sent, self.record_store, proves))
            ):
                self._learn(captured, sent, violations, proves)
            for states in self.captured_states:
                violations += states.violations(flight.turn)
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
    def waits(self) -> bool:
        """Whether the host has forwards to judge."""
        return bool(self._pending)

    def in_flight(self) -> Iterator[Launched]:
        """Captured forwards that the host has not collected."""
        for flight in self._flights:
            if flight.sent is not None:
                yield from flight.sent.forwards

    def _learn(
        self, captured: CapturedStep, sent: SentStep, violations: list[Violation | ViolationBatch], proves: bool
    ) -> None:
        """What `collect_quiet` has left of a step whose forwards have judged themselves; what fired joins the
        violations.
        """
        for forward in captured.learn(sent, self.record_store, self.unwritten, proves):
            violations += [*judge_tokens(forward, self.rules.oracle), *judge_mask(forward)]
        captured.learn_moves(sent, self.record_store)
        violations += captured.read_back(sent)
        if self.is_full:
            self._mark_read(sent)
        captured.finalise(sent)
        for run in sent.moves:
            if run.differs:
                with torch.inference_mode():
                    violations += self.mover.arrived(run.move.pool, run.entries[DESTINATIONS], sent.step)

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
        if self._pending:  # how far rows are written is told by the forwards that have run, judged or not
            uids = {request.uid for request in batch.requests}
            if any(request.uid in uids for forward in self._pending for request in forward.requests):
                self.judge_pending()
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
        granted = set(pages) if self._pending else ()
        if not all(forward.pages.isdisjoint(granted) for forward in self._pending):
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

    def read_all(self, substeps: Sequence[CapturedSubstep], requests: Sequence[Request], step: int) -> None:
        """content=full: the bytes of these rows are compared in this step, by attention or by the step's slice."""
        if all(substep.judges_bytes for substep in substeps):
            self.scrubber.attend(substeps[0].pool, requests, step)
        else:
            self.scrubber.reread_soon([request.request_id for request in requests])

    def with_what_spread(self, groups: Sequence[ViolationGroup]) -> Sequence[ViolationGroup]:
        """Where a forward stored NaN (N1), its rows are read again at once: bytes that changed before may be why."""
        stored = [violation for group in groups for violation in group.kept if violation.code == "N1"]
        names = {name for violation in stored for name in (violation.request_id, *violation.others)}
        if not names or not self._rereads_bytes:
            return groups
        with torch.inference_mode():
            for request in [own for name, own in self._ledger.requests.items() if name in names]:
                self.violations += self.scrubber.reread_all(request, stored[0].step)
        return [*groups, *self.violations.take()]

    def reread_soon(self, groups: Sequence[ViolationGroup]) -> None:
        """Damage has neighbours: every request that holds one of these pages, or the next, is read whole at once."""
        if not self._rereads_bytes:
            return
        kept = [violation for group in groups for violation in group.kept if violation.state is None]
        near = {violation.page + step for violation in kept for step in (-1, 0, 1)}
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

    def pack(self, pages: Sequence[int], step: int, group: str | None = None) -> PageSnapshot:
        """What is known of pages whose bytes leave, in all pools or in those of a group."""
        self.judge_pending()
        with torch.inference_mode():
            return self.snapshots.pack(pages, step, group)

    def reread_leaving(self, group: str, pages: Sequence[int]) -> bool:
        """Final bytes on these full pages in a group behind a slot map, which gives them up; whether a check fired.

        Nothing waits to be judged.
        """
        if not self._rereads_bytes or not len(pages):
            return False
        with torch.inference_mode():
            violations = self.window_eviction.reread(group, pages, self.step)
        self.violations += violations
        return bool(violations)

    def reread_pages(self, pages: Sequence[int], step: int) -> None:
        """All bytes of these pages, which no row names."""
        if self._rereads_bytes:
            with torch.inference_mode():
                self.violations += self.cached.reread(pages, step)

    def report(self, violations: Sequence[Violation | ViolationBatch]) -> None:
        if violations:
            self.violations += violations

    def forget(self, pages: Sequence[int]) -> None:
        """What was judged on these pages is judged anew, should the row go on."""
        slots = slots_of_pages(pages, self._state.page_size)
        for pool in self._state.pools:
            if not pool.is_partial:  # else judged in every forward
                self.record_store.judged[pool.base + slots] = False

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
