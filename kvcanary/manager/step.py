"""StepChecks: everything that is judged between two looks of the engine, at once and in the order of its run."""

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
from kvcanary.calls.set_aside import SetAside
from kvcanary.calls.violation import Hit
from kvcanary.calls.violation_log import HitBatch, HitGroup, HitLog
from kvcanary.captured.decoded import Launched
from kvcanary.captured.in_flight import InFlight, Marks
from kvcanary.captured.moves import DESTINATIONS
from kvcanary.captured.step import CapturedStep, Told
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.checks.content import find_changed
from kvcanary.checks.fast_path import Settled, Settler
from kvcanary.checks.lengths import expect_growth, judge_commit, judge_heard, judge_lengths, judge_mask, judge_starts
from kvcanary.checks.row_spans import read_entries, sort_rows
from kvcanary.checks.rows import Reader, Verdict
from kvcanary.checks.seals import Sealer
from kvcanary.checks.stores import expect_values, keep_lanes
from kvcanary.checks.tokens import Oracle, judge_tokens
from kvcanary.checks.writes import judge_layers
from kvcanary.config import CanaryConfig
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.ledger.requests import Batch
from kvcanary.native.layout import LEFT_TO_BOOKS, NOT_WRITTEN, PAGES_FINAL
from kvcanary.pools.slot_maps import slots_in
from kvcanary.records.fingerprints import joined, slots_are_right
from kvcanary.records.mailbox import IN_THE_AIR
from kvcanary.records.record_store import Move, RecordStore
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.prefix_cache import PrefixScrubber
from kvcanary.scrub.rereads import Rereads
from kvcanary.scrub.scrubber import Scrubber
from kvcanary.scrub.unwritten_tails import UnwrittenTails
from kvcanary.scrub.window_eviction import WindowEviction
from kvcanary.transfers.moves import Mover
from kvcanary.transfers.snapshots import Parcel, Parcels


class Rewritten(NamedTuple):
    """Slots of a pool, [n] int64, whose bytes are no longer those that pending forwards have read."""

    pool: PoolState
    slots: Ints


class StepChecks:
    """What waits to be judged, and what fired.

    hits:   checks that fired since somebody took them
    oracle: who knows tokens that the host does not know yet; None: nobody
    step:   the one that runs;  looks: bytes that are being read again;  is_full: all that a forward reads is compared
    judged: is told of the forwards of a pool when they have been judged;  proved: of those that a loop proved clean
    landing: is told of the step whose hits come now, None: those of the one that runs
    publish_pages: what has happened to pages since the last time is true on the device before anything is judged
    """

    def __init__(
        self, state: CanaryState, ledger: Ledger, config: CanaryConfig, coverage: Coverage, aside: SetAside
    ) -> None:
        self._state, self._ledger, self._config, self._coverage = state, ledger, config, coverage
        self.mirror = RecordStore(state)
        self._sealer = Sealer(self.mirror, ledger)
        self._settler = Settler(state, ledger, self.mirror, self._sealer)
        self._reader = Reader(state, ledger, self.mirror, config.disable)
        compares_content = "R9" not in config.disable
        self._rereads = config.content != "write" and compares_content
        self.is_full = config.content == "full" and compares_content
        moves = config.content != "write" and "T1" not in config.disable
        self._mover = Mover(state, self.mirror, ledger, moves, tells_sources=compares_content)
        self._parcels = Parcels(state, self.mirror, ledger, compares_content=moves)
        self.expect_own = self._parcels.expect_own
        self._pending: list[Forward] = []
        self._drafted: dict[int, Drafted] = {}  # by pool, the last one
        self._leaver = WindowEviction(state, ledger, self.mirror, coverage)
        self.publish_pages = partial(state.publish, ledger.pages)
        self._marks = Marks(state.records.device)
        self.looks = Rereads(state.records.device, at_once=state.records.device.type == "cpu")
        self.tails = UnwrittenTails(state, ledger, self.mirror, config, coverage, self.looks)
        self.sweeper = Scrubber(state, ledger, config.budget, self.looks)
        self.cached = PrefixScrubber(state, ledger, self.looks, is_on=self._rereads)
        self.hits = HitLog(config.disable, aside.judged if config.mode != "raise" else None)
        self.oracle: Oracle | None = None
        self.judged: Callable[[Sequence[Forward], Verdict], None] = _nobody
        self.proved: Callable[[Sequence[Forward]], None] = _nobody
        self.landing: Callable[[int | None], None] = lambda step: None
        self.static: CapturedStep | None = None
        self._flights: deque[InFlight] = deque()
        self.step = 0

    def prepare(self) -> None:
        """No later step waits for kernels that look at bytes: a GPU compiles and loads what is launched first."""
        if not self._rereads:
            return
        with torch.inference_mode():
            for pool in self._state.pools:
                self.looks.prepare(pool)

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

    def settle(self, rewritten: Rewritten | None = None) -> None:
        """Seal and judge all pending forwards; `rewritten`: what a declared move has put other bytes into since."""
        self.land()
        if not self._pending:
            self.mirror.flush()
            return
        forwards, self._pending = self._pending, []
        self.publish_pages()
        left = Settled.ALL if self.oracle is not None else self._settler.settle(forwards, self.hits)
        if left is Settled.NOTHING and not self.is_full:
            self.proved(forwards)
        else:
            with torch.inference_mode():
                self._judge_all(forwards, rewritten, left)
        self._count(forwards)

    def _judge_all(self, forwards: list[Forward], rewritten: Rewritten | None, left: Settled) -> None:
        """What the loop has left to the rules."""
        if left is Settled.ALL:
            self.hits += self._judge_plans(forwards)
        for pool in self._state.pools:
            own = [forward for forward in forwards if forward.pool is pool]
            if own:
                self._judge(pool, own, rewritten, left is Settled.NOTHING)

    def settle_before_launch(self) -> None:
        """A captured forward reads what the host sealed and what is true of pages: both are on the device first."""
        if self._pending:
            self.settle()
        if self.mirror.fresh:
            self.mirror.flush()
        if self._ledger.pages.changed:
            self.publish_pages()

    def send(self, is_waited_for: bool) -> InFlight:
        """What this step has launched, with its slice of the rolling check; nobody waits.

        is_waited_for: the host will have waited for all of it but looks, by itself, before somebody asks for it
        """
        batch, hits = self._look_at_tails(self.step)
        return self._send(hits, is_waited_for, batch)

    def has_nothing_there(self, flight: InFlight) -> bool:
        """Whether a device has nothing to say of a flight or of one before it, so that it may land at once."""
        is_alone = len(self._flights) == 1 and (flight.told is None or not flight.told.launches)
        return is_alone and not self._state.judges_on_device

    def land(self, last: InFlight | None = None) -> None:
        """Judge captured forwards and looks up to this flight (None: all); waits for their copies.

        What forwards wrote, the host learns before it seals anything else. The longest in the air comes first, and
        where somebody interrupts the host as it waits it stays there.
        """
        static, flights = self.static, self._flights
        if last is None and (self.looks.waits or (static is not None and (static.launched or static.moves))):
            self._send_all()
        while flights and (last is None or not last.has_landed):
            flight = flights[0]
            if flight.over is not None or not flight.is_over:
                self._marks.wait(flight)
            flights.popleft()
            hits, told, proves = flight.hits, flight.told, self.oracle is None
            if (
                static is not None
                and told is not None
                and (self.is_full or not static.land_quiet(told, self.mirror, proves))
            ):
                self._learn(static, told, hits, proves)
            if flight.looks is not None:
                hits += flight.looks.hits()
            flight.has_landed = True
            if hits:
                self.landing(flight.step)
                self.hits += hits
                self.landing(None)

    def begin_step(self, step: int) -> None:
        """This one runs. What its forwards would overwrite is judged first, be steps between them without any."""
        self.step, static, flights = step, self.static, self._flights
        if static is not None:
            while flights and flights[0].turn < static.bank.turn + 1 - IN_THE_AIR:
                self.land(flights[0])
            static.bank.begin_step(step)

    @property
    def compares_moves(self) -> bool:
        """Whether bytes are compared where they have arrived."""
        return self._mover.compares_content

    @property
    def waits(self) -> bool:
        """Whether the host has forwards to judge."""
        return bool(self._pending)

    def in_the_air(self) -> Iterator[Launched]:
        """Captured forwards of which the host has not heard."""
        for flight in self._flights:
            if flight.told is not None:
                yield from flight.told.forwards

    def _send_all(self) -> None:
        """With looks that run beside; the host is about to wait for them."""
        self.looks.beside.join()
        self._send([])

    def _send(self, hits: list[Hit | HitBatch], is_waited_for: bool = False, batch: Batch | None = None) -> InFlight:
        """`hits`: of this step, known already; `batch`: bytes of these requests are read beside what comes next."""
        if len(self._flights) == IN_THE_AIR:
            self.land(self._flights[0])
        static = self.static
        if static is not None:
            hits = [*static.judge_lacking(self.step), *hits]
        if static is None:
            flight = InFlight(self.step, None, hits)
        else:
            flight = InFlight(self.step, static.send(self.step), hits, static.bank.turn)
        self._flights.append(flight)
        if batch is not None:
            with self.looks.beside.behind():
                flight.hits = self._read_slice(self.step, batch) + hits
                flight.looks, flight.over = self.looks.send(), self._marks.take()
            return flight
        if self.looks.waits or not is_waited_for:
            flight.looks, flight.over = self.looks.send(), self._marks.take()
        return flight

    def _learn(self, static: CapturedStep, told: Told, hits: list[Hit | HitBatch], proves: bool) -> None:
        """What `land_quiet` has left of a step whose forwards have judged themselves; what fired joins the hits."""
        for forward in static.learn(told, self.mirror, self.unwritten, proves):
            hits += judge_tokens(forward, self.oracle)
            hits += judge_mask(forward)
        static.learn_moves(told, self.mirror)
        hits += static.harvest(told)
        if self.is_full:
            self._mark_read(told)
        static.finalise(told)
        for run in told.moves:
            if run.differs:
                with torch.inference_mode():
                    hits += self._mover.arrived(run.move.pool, run.entries[DESTINATIONS], told.step)

    def _mark_read(self, told: Told) -> None:
        """What attention has compared; several forwards of a step read the same rows."""
        runs = [run for run in told.forwards if run.substep.judges_bytes]
        rows = [(run.substep.pool, request) for run in runs for request in run.batch.requests]
        for pool, request in {(pool.pool_id, request.uid): (pool, request) for pool, request in rows}.values():
            self._coverage.bytes_checked += self.sweeper.mark_read(pool, request, told.step)

    def commit(self, batch: Batch, lens: array[int], step: int) -> None:
        """Entries [0, committed length) of these rows are final since this step.

        LifetimeError where a row shrinks: nothing has happened then.
        """
        ledger = self._ledger
        if self._pending:
            self._settle_rows_of(batch.requests)
        found = ledger.steps.commit_rows(batch, lens, step, is_judged=False)
        if not found:
            return
        if found == LEFT_TO_BOOKS:
            expect_growth(batch.requests, lens)
            self.hits += judge_heard(batch.requests, self._state.pools[0], lens, step)
            found = ledger.steps.commit_rows(batch, lens, step, is_judged=True)
        if found & NOT_WRITTEN:
            self.unwritten(batch.requests, step)
        if found & PAGES_FINAL:
            for request in batch.requests:
                if not request.in_the_air:
                    ledger.finalise(request, step)

    def unwritten(self, requests: Sequence[Request], step: int) -> None:
        """Of some of these, entries became final in a step that nobody has written."""
        self.hits += judge_commit(requests, self._state.pools, step)

    def settle_writes_into(self, pages: Sequence[int]) -> None:
        """A pending write belongs to the grant of its time: seal it before its page is granted anew."""
        if not self._pending:
            return
        granted = set(pages)
        if not all(granted.isdisjoint(forward.pages) for forward in self._pending):
            self.settle()

    def _settle_rows_of(self, requests: Sequence[Request]) -> None:
        """How far their rows are written is told by the forwards that have run, judged or not."""
        uids = {request.uid for request in requests}
        if any(request.uid in uids for forward in self._pending for request in forward.requests):
            self.settle()

    def _look_at_tails(self, step: int) -> tuple[Batch | None, list[Hit | HitBatch]]:
        """The running requests, where a slice of their bytes is due, and what is known of tails at once.

        Under `full` it comes to the rows that nobody steps. Tails come first, for the next forward may write there.
        """
        sweeper, tails = self.sweeper, self.tails
        is_due = not step % sweeper.stride or sweeper.hurried  # after a finding, too
        if not (is_due or tails.has_new_pages or self.is_full) or not self._rereads:
            return None, []
        batch = sweeper.batch() if is_due or self.is_full else None
        hits = tails.look(step, sweeper.stride, batch, sweeper.hurried)
        return batch if is_due else None, hits

    def _read_slice(self, step: int, batch: Batch) -> list[Hit | HitBatch]:
        return [*self.sweeper.slice(step, batch), *self.cached.slice(step, self.sweeper.stride)]

    def read_all(self, substeps: Sequence[CapturedSubstep], requests: Sequence[Request], step: int) -> None:
        """content=full: the bytes of these rows are compared in this step, by attention or by the step's slice."""
        if all(substep.judges_bytes for substep in substeps):
            self.sweeper.attend(substeps[0].pool, requests, step)
        else:
            self.sweeper.look_around([request.request_id for request in requests])

    def look_around(self, groups: Sequence[HitGroup]) -> None:
        """Damage has neighbours: every request that holds one of these pages, or the next, is read whole at once."""
        if not self._rereads:
            return
        near = {hit.page + step for group in groups for hit in group.kept for step in (-1, 0, 1)}
        pages = {page for page in near if page >= 0}
        requests = self._ledger.requests.items()
        self.sweeper.look_around(name for name, request in requests if not pages.isdisjoint(request.pages))

    def look_again(self, request: Request, step: int) -> None:
        """All committed bytes of a request that ends."""
        self.settle()
        if self._rereads:
            with torch.inference_mode():
                self.hits += self.sweeper.last_look(request, step)
                self.hits += self.tails.last_look(request, step)
            self.land()  # what a GPU says of them, before the request is gone

    def move(self, source: PoolState, pool: PoolState, src: Ints, dst: Ints, step: int, guesses: bool) -> None:
        """Records follow bytes; what a slot map sends nowhere has none."""
        has_lanes = not guesses or self._config.content == "full"
        src, dst = np.ascontiguousarray(src), np.ascontiguousarray(dst)
        move = Move(slots_in(source.view, src), slots_in(pool.view, dst), src, dst)
        if self._pending:
            move = move.of_entries(source, pool)
        self.settle(Rewritten(pool, move.dst))
        self.hits += self._mover.apply(source, pool, move, step, has_lanes, lengthens=not guesses)

    def pack(self, pages: Sequence[int], step: int, group: str | None = None) -> Parcel:
        """What is known of pages whose bytes leave, in all pools or in those of a group."""
        self.settle()
        with torch.inference_mode():
            return self._parcels.pack(pages, step, group)

    def unpack(self, how: str, parcel: Parcel, request: Request, pages: Sequence[int], length: int, step: int) -> None:
        """Bytes are back, and their records follow; the caller has settled. `how`: what brought them, in one word."""
        with torch.inference_mode():
            self.publish_pages()
            self.hits += self._parcels.unpack(how, parcel, request, pages, length, step)

    def expect_load(self, pages: Iterable[int]) -> None:
        """Bytes will come into these granted pages, for which their poison vouches."""
        self._parcels.poisoned.update(pages)

    def unpack_group(self, group: str, parcels: Sequence[Parcel], pages: Sequence[int], step: int) -> None:
        """As `unpack`, for pages of a group that have kept their grants."""
        with torch.inference_mode():
            self.publish_pages()
            self.hits += self._parcels.unpack_group(group, parcels, pages, step)

    def look_at_pages(self, pages: Sequence[int], step: int) -> None:
        """All bytes of these pages, which no row names."""
        if self._rereads:
            with torch.inference_mode():
                self.hits += self.cached.look(pages, step)

    def enter(self, group: str, own_pages: Sequence[int]) -> None:
        """A group behind a slot map has granted pages of its own."""
        self._leaver.enter(group, own_pages)

    def look_at_leaving(self, group: str, pages: Sequence[int], step: int) -> bool:
        """Final bytes on these full pages in a group behind a slot map, which gives them up; whether a check fired.

        The caller has settled.
        """
        self._parcels.left.leave(group, pages)
        if not self._rereads or not len(pages):
            return False
        with torch.inference_mode():
            hits = self._leaver.look(group, pages, step)
        self.hits += hits
        return bool(hits)

    def report(self, hits: Sequence[Hit | HitBatch]) -> None:
        if hits:
            self.hits += hits

    def forget(self, pages: Sequence[int]) -> None:
        """What was judged on these pages is judged anew, should the row go on."""
        size = self._state.page_size
        for pool in self._state.pools:
            if pool.is_partial:
                continue  # judged in every forward
            for page in pages:
                first = pool.base + page * size
                self.mirror.judged[first : first + size] = False

    def _judge_plans(self, forwards: Sequence[Forward]) -> list[Hit | HitBatch]:
        """What forwards planned and stored, rule by rule; then all of it is sealed."""
        hits: list[Hit | HitBatch] = []
        for forward in forwards:
            forward.read_rows()
            hits += judge_layers(forward)
            hits += judge_tokens(forward, self.oracle)
            hits += judge_mask(forward)
        hits += self._sealer.seal(forwards)
        self.mirror.flush()
        for forward in forwards:
            keep_lanes(forward)
            hits += judge_lengths(forward)
            hits += judge_starts(forward)
            self._write_rows(forward)
        return hits

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
            verdict.hits += self._check_all_bytes(pool, forwards, verdict, rewritten)
        self.hits += verdict.hits
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
    ) -> list[HitBatch]:
        """content=full: every byte that these forwards have read or written, and that is still there."""
        slots = joined([self._reader.slots(verdict.segments), *(forward.pool_slots for forward in forwards)])
        kept: slice | Ints = slice(None)
        if rewritten is not None and rewritten.pool is pool:
            kept = own = np.flatnonzero(~np.isin(on_host(slots), rewritten.slots))
            self._coverage.skip("entries rewritten by a move before their bytes were read", len(slots) - len(own))
            slots = slots[torch.from_numpy(own).to(slots.device)]
        self._coverage.bytes_checked += len(slots) * pool.view.slot_bytes
        hits: list[HitBatch] = []
        if not slots_are_right(pool, slots):
            last = forwards[-1]
            hits = find_changed(
                pool,
                on_host(slots),
                lambda: self._entries_of(forwards, verdict).at(kept),
                last.site,
                last.step,
                both_lanes=False,
            )
        step = forwards[-1].step
        for request in {request.uid: request for forward in forwards for request in forward.requests}.values():
            self.sweeper.mark_read(pool, request, step)
        return hits

    def _entries_of(self, forwards: Sequence[Forward], verdict: Verdict) -> Entries:
        """What is known of every slot that was read, then of every slot that was written."""
        written = [written_entries(forward) for forward in forwards]
        if not verdict.segments:
            return join_entries(written)
        pool = forwards[0].pool
        read = read_entries(pool, verdict.segments)
        queues = [self._ledger.request(name).reads[pool.pool_id] for name in read.request_ids]
        last_looks = [-1 if (step := queue.oldest()) is None else step for queue in queues]
        read.last_good = np.array(last_looks)[read.rows]  # of the bytes: identity is good to this very step
        return join_entries([read, *written])


def _nobody(forwards: Sequence[Forward], verdict: Verdict | None = None) -> None:
    """Who is told where nobody asked to be."""
