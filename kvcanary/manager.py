"""CanaryManager: what an engine holds. It owns the state, hands out substeps, and runs the checks of a step at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor

from kvcanary.blame import Segment
from kvcanary.certificate import Coverage, certificate
from kvcanary.config import CanaryConfig
from kvcanary.content import Looked, find_changed, slots_are_right
from kvcanary.describe import Describer
from kvcanary.errors import CanaryConfigError, HookOrderError, KVCorruptionError, LifetimeError, PlanError
from kvcanary.findings import Finding, FindingLog
from kvcanary.fingerprints import Fingerprints
from kvcanary.forward import Forward, Paths
from kvcanary.hits import Hit, join_hits
from kvcanary.ledger import NO_PAGE, Ledger, Request
from kvcanary.moving import Move, Mover
from kvcanary.reading import Reader, Verdict
from kvcanary.report import Report
from kvcanary.sealing import Entries, Sealer
from kvcanary.sites import SUBSTEP_KINDS
from kvcanary.state import CanaryState, PoolState
from kvcanary.substep import SubstepCanary
from kvcanary.sweep import Sweeper
from kvcanary.twin import Twin
from kvcanary.views import PoolView
from kvcanary_kernels.record import signed

REMEMBERED_INCIDENTS = 65536
_events = structlog.get_logger("kvcanary")


class CanaryManager:
    """The canary of one engine. See the method names in the order in which an engine calls them."""

    def __init__(self, config: CanaryConfig, pools: Sequence[PoolView]) -> None:
        if not config.enabled:
            raise CanaryConfigError("mode 'off' installs nothing: build no manager and pass canary=None")
        self.config = config
        self.step = 0
        seed = secrets.randbits(64) if config.seed is None else config.seed
        self._state = CanaryState(pools, seed)
        self._ledger = self._new_ledger()
        self._twin = Twin()
        self._sealer = Sealer(self._state, self._twin, self._ledger.generations)
        self._fingerprints = Fingerprints(self._state, self._ledger)
        self._mover = Mover(self._state, self._twin, self._fingerprints, self._ledger.generations)
        self._reader = Reader(self._state, self._ledger, self._twin, config.disable)
        self._sweeper = Sweeper(self._state, self._ledger, config.budget)
        self._describer = Describer(self._state, self._ledger)
        self._coverage = Coverage()
        self._log = FindingLog()
        self._incidents: dict[tuple[int, int], int] = {}
        self._open: SubstepCanary | None = None
        self._pending: list[Forward] = []
        self._moves: list[Move] = []
        self._paths: tuple[Paths, ...] = tuple({} for _ in self._state.pools)
        self._hits: list[Hit] = []

    # requests and pages

    def admit(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request with its prompt: the host truth of its rows starts."""
        self._ledger.admit(request_id, token_ids, self.step)

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens that were accepted for this request."""
        self._ledger.append(request_id, token_ids, self.step)

    def on_alloc(self, request_id: str, pages: Sequence[int]) -> None:
        """Pages granted, in row order: the row's page i holds positions [i * page_size, (i + 1) * page_size)."""
        self._settle_writes_into(pages)
        self._ledger.grant(request_id, pages, self.step)
        self._publish_generations(pages)

    def on_free(self, request_id: str, pages: Sequence[int]) -> None:
        """Pages given back; from now on nobody may read them."""
        self._settle()
        request = self._ledger.request(request_id)
        if not request.released or self.config.content == "write":
            self._count_unread(request, pages)
        self._fingerprints.drop(request)
        self._ledger.free(request_id, pages, self.step)
        self._publish_generations(pages)
        self._twin.forget_verdicts()
        if request.released and not request.pages:
            self._ledger.forget(request_id)

    # the step

    def begin_step(self, step: int) -> None:
        """Steps are numbered upwards; substeps, checks and findings carry the number."""
        self._expect_closed("begin_step()")
        if step <= self.step and self._coverage.forwards:
            raise HookOrderError(f"begin_step() must count upwards: step {step} follows step {self.step}")
        self.step = step

    def substep(self, kind: str, index: int, pool: str) -> SubstepCanary:
        """The hooks of the next forward."""
        self._expect_closed(f"substep({kind!r})")
        if kind not in SUBSTEP_KINDS:
            raise PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {kind!r}")
        return SubstepCanary(self, kind, index, self._pool(pool))

    def check(self) -> None:
        """Judge everything opened since the last check, and one slice of the rolling check; before tokens leave."""
        self._expect_closed("check()")
        with torch.inference_mode():
            self._settle()
            self._fingerprints.decide(self.step)
            if self._sweeper.is_due(self.step):
                self._fingerprints.write()
                if self.config.content == "rolling" and "R9" not in self.config.disable:
                    self._hits += self._sweeper.slice(self.step)
        self._coverage.peak_live_bytes = max(self._coverage.peak_live_bytes, self._live_bytes())
        self._act()

    def drain(self) -> None:
        """At idle and shutdown: judge what is still pending."""
        self._expect_closed("drain()")
        self._settle()
        self._act()

    def on_move(self, pool: str, src: Tensor, dst: Tensor) -> None:
        """Bytes were moved, every source read before any destination was written: the records follow."""
        self._expect_closed("on_move()")
        state = self._pool(pool)
        if self._pending:
            self._settle()
        self._moves.append(Move(state, src.tolist(), dst.tolist(), self.step))

    def commit(self, request_id: str, committed_len: int) -> None:
        """Entries [0, committed_len) of the row are final."""
        request = self._ledger.request(request_id)
        if committed_len < request.committed_len:
            raise LifetimeError(
                f"committed_len of {request_id!r} must not shrink, {committed_len} follows {request.committed_len}"
            )
        for pool in self._state.pools:
            self._sweeper.commit(request, pool)
        request.committed_len, request.commit_step = committed_len, self.step

    def release(self, request_id: str) -> None:
        """The request ends, before its last tokens leave: judge what is pending, and look at all its bytes again."""
        self._expect_closed("release()")
        request = self._ledger.request(request_id)
        with torch.inference_mode():
            self._settle()
            self._fingerprints.write_of(request)
            if self.config.content != "write" and "R9" not in self.config.disable:
                self._hits += self._sweeper.last_look(request, self.step)
        request.released = True
        self._act()

    # what was found

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return self._log.findings

    def certificate(self) -> dict[str, Any]:
        """What was checked, what was not and why; plain JSON."""
        coverage = self._coverage
        self._count_reads()
        coverage.max_unread_steps = max(self._sweeper.longest_wait, self._sweeper.waiting(self.step))
        groups = [group.to_dict() for group in self._log.groups.values()]
        return certificate(self.config, coverage, self._live_bytes(), self._state.keys.seed_id, groups)

    # called by substeps

    def requests_of(self, request_ids: Sequence[str]) -> list[Request]:
        requests = self._ledger.requests
        try:
            return [requests[request_id] for request_id in request_ids]
        except KeyError:
            return [self._ledger.request(request_id) for request_id in request_ids]

    def opening(self, kind: str, pool: PoolState) -> None:
        """Draft nodes are read as they are now: a forward that may write over them has them judged first."""
        if kind != "draft" and self._paths[pool.pool_id]:
            self._settle()

    def paths_of(self, pool: PoolState) -> Paths:
        return self._paths[pool.pool_id]

    def opened(self, substep: SubstepCanary, forward: Forward, hits: Sequence[Hit]) -> None:
        self._open = substep
        self._pending.append(forward)
        self._hits += hits
        if forward.refused_reads and "R1" not in self.config.disable:
            self._hits += _refused_reads(forward)

    def report_hits(self, hits: Sequence[Hit]) -> None:
        self._hits += [hit for hit in hits if hit.code not in self.config.disable]

    def closed(self) -> None:
        self._open = None

    # the checks

    def _settle(self) -> None:
        """Apply moves, seal and judge all pending forwards; what fires waits for `_act`."""
        if not self._pending and not self._moves:
            return
        with torch.inference_mode():
            moves, self._moves = self._moves, []
            self._mover.apply(moves)
            forwards, self._pending = self._pending, []
            for paths in self._paths:
                paths.clear()
            if not forwards:
                return
            forwards.sort(key=lambda forward: forward.pool.pool_id)
            entries = self._sealer.seal(forwards)
            self._note_rows(forwards)
            self._fingerprint(forwards, entries)
            verdict = self._reader.judge(forwards)
            if self.config.content == "full" and "R9" not in self.config.disable:
                verdict.hits += self._check_all_bytes(forwards, verdict, entries)
        if verdict.hits:
            self._note_last_good(verdict.hits)
            self._hits += verdict.hits
        for forward in forwards:
            for request in forward.requests:
                request.known[forward.pool.pool_id].step = forward.step
        coverage = self._coverage
        coverage.forwards += len(forwards)
        coverage.slots_checked += sum(forward.bounds[-1] for forward in forwards)
        coverage.slots_sealed += len(entries.rows)
        coverage.skip("truth not known to the host", verdict.unknown_truths)

    def _fingerprint(self, forwards: Sequence[Forward], entries: Entries) -> None:
        full = self.config.content == "full"
        for forward, first in zip(forwards, entries.firsts, strict=True):
            if full or forward.kind != "draft":
                self._fingerprints.hold(forward, entries.writer, first)
        if full:
            self._fingerprints.write_all()

    def _check_all_bytes(self, forwards: Sequence[Forward], verdict: Verdict, entries: Entries) -> list[Hit]:
        """content=full: every byte that these forwards have read or written."""
        hits: list[Hit] = []
        for pool in self._state.pools:
            own = [forward for forward in forwards if forward.pool is pool]
            if not own:
                continue
            places = _places_of(pool, own, verdict.segments.get(pool, []), entries)
            slots = self._state.ints(places)
            self._coverage.bytes_checked += len(places) * pool.view.slot_bytes
            if not slots_are_right(pool, slots):
                last = own[-1]
                hits += find_changed(
                    pool, slots, partial(list, places.values()), last.site, last.step, both_lanes=False
                )
            for request in {request.uid: request for forward in own for request in forward.requests}.values():
                self._sweeper.mark_read(pool, request, self.step)
        return hits

    def _note_rows(self, forwards: Sequence[Forward]) -> None:
        """How far each row of each pool has been written by a forward that is no guess."""
        for forward in forwards:
            if forward.kind == "draft":
                continue
            pool_id, width = forward.pool.pool_id, forward.read.rows_per_request
            for number, request in enumerate(forward.requests):
                length = forward.prefixes[number] + forward.written[number * width]
                if forward.kind == "extend":
                    length = min(length, request.committed_len)  # what lies beyond is junk
                request.row_lens[pool_id] = length

    def _note_last_good(self, hits: Sequence[Hit]) -> None:
        """Identity is judged in every forward: an entry judged before was good in the step before this one."""
        for hit in hits:
            request = self._ledger.requests.get(hit.request_id or "")
            if request is None or hit.last_good is not None or hit.position is None:
                continue
            known = request.known[hit.pool.pool_id]
            if hit.position < known.judged:
                hit.last_good = known.step

    def _act(self) -> None:
        """Join hits of the active checks into findings; log them, or stop the engine."""
        hits = [hit for hit in self._hits if hit.code not in self.config.disable]
        self._hits = []
        if not hits:
            return
        self._count_reads()
        with torch.inference_mode():
            findings = [self._describer.finding(incident, self._incident(incident)) for incident in join_hits(hits)]
        told = [finding for finding in findings if self._log.add(finding)]
        counters = self._coverage.counters()
        if self.config.mode == "raise":
            action = f"raised KVCorruptionError; no token of step {self.step} leaves the engine"
            raise KVCorruptionError(findings, Report(tuple(findings), action, counters))
        for finding in told:
            report = Report((finding,), "logged; the engine goes on", counters)
            _events.error("kv_corruption", report=report.text(), **finding.to_dict())

    def _incident(self, incident: Sequence[Hit]) -> int:
        """The number of an incident; a slot that was seen before keeps its number."""
        known = [self._incidents[hit.place] for hit in incident if hit.place in self._incidents]
        number = known[0] if known else len(self._incidents) + 1
        for hit in incident:
            if len(self._incidents) < REMEMBERED_INCIDENTS:
                self._incidents.setdefault(hit.place, number)
        return number

    # helpers

    def _new_ledger(self) -> Ledger:
        state = self._state
        return Ledger(
            num_pages=state.generations.shape[0],
            page_size=state.page_size,
            null_pages=-(-max(pool.view.null_slots for pool in state.pools) // state.page_size),
            keys=state.keys,
            roots=[(pool.root, pool.view.token_offset) for pool in state.pools],
        )

    def _pool(self, name: str) -> PoolState:
        pool = self._state.by_name.get(name)
        if pool is None:
            raise PlanError(f"pool must be one of {', '.join(self._state.by_name)}, got {name!r}")
        return pool

    def _expect_closed(self, what: str) -> None:
        if self._open is not None:
            raise HookOrderError(f"{what} must wait for close() of {self._open}")

    def _settle_writes_into(self, pages: Sequence[int]) -> None:
        """A pending write belongs to the grant of its time: seal it before its page is granted anew."""
        granted, size = set(pages), self._state.page_size
        if any(slot // size in granted for forward in self._pending for slot in forward.write_slots):
            self._settle()

    def _publish_generations(self, pages: Sequence[int]) -> None:
        if pages:
            generations = self._ledger.generations
            self._state.set_generations(pages, [signed(generations[page]) for page in pages])

    def _count_unread(self, request: Request, pages: Sequence[int]) -> None:
        """Committed bytes on these pages go without a last look."""
        size = self._state.page_size
        for pool in self._state.pools:
            length = request.final_len(pool.pool_id)
            for page in pages:
                if page != NO_PAGE and page in request.pages:
                    first = request.pages.index(page) * size
                    unread = max(0, min(length - first, size))
                    self._coverage.freed_unread_bytes += unread * pool.view.slot_bytes

    def _count_reads(self) -> None:
        self._coverage.bytes_checked += self._sweeper.bytes_read
        self._sweeper.bytes_read = 0

    def _live_bytes(self) -> int:
        return sum(
            request.final_len(pool.pool_id) * pool.view.slot_bytes
            for request in self._ledger.requests.values()
            for pool in self._state.pools
            if not request.released
        )


def _refused_reads(forward: Forward) -> list[Hit]:
    """R1 for every entry whose id is outside the pool."""
    hits = []
    for entry, slot in forward.refused_reads.items():
        row = next(row for row in range(len(forward.written)) if entry < forward.bounds[row + 1])
        position, request_id = entry - forward.bounds[row], forward.request_of(row).request_id
        hits.append(Hit("R1", forward.pool, slot, position, request_id, forward.site, forward.step))
    return hits


def _places_of(
    pool: PoolState, forwards: Sequence[Forward], segments: Sequence[Segment], entries: Entries
) -> dict[int, Looked]:
    """Every slot of this pool that was read or written, once, with what is known of it."""
    places: dict[int, Looked] = {}
    for segment in segments:
        slots = segment.forward.row_slots(segment.start, segment.start + segment.length)
        for position, slot in enumerate(slots, segment.first_position):
            if slot >= pool.view.null_slots:
                places[slot] = Looked(slot, position, segment.request.request_id, None)
    for forward in forwards:
        entry = 0
        for row, written in enumerate(forward.written):
            name = forward.request_of(row).request_id
            for number in range(entry, entry + written):
                slot = forward.write_slots[number]
                if slot + pool.base in entries.writer:
                    places[slot] = Looked(slot, forward.write_positions[number], name, None)
            entry += written
    return places
