"""CanaryManager: what an engine holds. It owns the state, hands out substeps, and runs the checks of a step at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import structlog
import torch
from torch import Tensor

from kvcanary.certificate import Coverage, certificate
from kvcanary.config import CanaryConfig
from kvcanary.content import Looked, find_changed, slots_are_right
from kvcanary.describe import Describer
from kvcanary.errors import CanaryConfigError, HookOrderError, KVCorruptionError, LifetimeError, PlanError
from kvcanary.findings import Finding, FindingLog
from kvcanary.forward import Forward, on_host
from kvcanary.hits import Hit, join_hits
from kvcanary.lanes import joined
from kvcanary.ledger import NO_PAGE, Judged, Ledger, Request
from kvcanary.mirror import Mirror
from kvcanary.moving import Mover
from kvcanary.reading import Reader, Verdict
from kvcanary.report import Report
from kvcanary.sealing import Sealer
from kvcanary.sites import SUBSTEP_KINDS
from kvcanary.staging import Stage
from kvcanary.state import CanaryState, PoolState
from kvcanary.substep import SubstepCanary
from kvcanary.sweep import Sweeper
from kvcanary.views import PoolView
from kvcanary.writing import judge_layers
from kvcanary_kernels.record import NO_OWNER

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
        self._mirror = Mirror(self._state)
        self._sealer = Sealer(self._mirror, self._state.page_size, self._ledger.generations)
        self._stages = {pool: Stage(self._state, pool) for pool in self._state.pools}
        self._mover = Mover(self._state, self._mirror, self._ledger.generations)
        self._reader = Reader(self._state, self._ledger, self._mirror, config.disable)
        self._sweeper = Sweeper(self._state, self._ledger, config.budget)
        self._describer = Describer(self._state, self._ledger)
        self._coverage = Coverage()
        self._log = FindingLog()
        self._incidents: dict[tuple[int, int], int] = {}
        self._open: SubstepCanary | None = None
        self._pending: list[Forward] = []
        self._hits: list[Hit] = []
        self._compares_content = "R9" not in config.disable

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
        self._publish(pages, self._ledger.request(request_id).uid)

    def on_free(self, request_id: str, pages: Sequence[int]) -> None:
        """Pages given back; from now on nobody may read them."""
        self._settle()
        request = self._ledger.request(request_id)
        if not request.released or self.config.content == "write":
            self._count_unread(request, pages)
        self._ledger.free(request_id, pages, self.step)
        self._forget_judged(request, pages)
        self._publish(pages, NO_OWNER)
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
        if self._open is not None:
            self._expect_closed(f"substep({kind!r})")
        if kind not in SUBSTEP_KINDS:
            raise PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {kind!r}")
        return SubstepCanary(self, kind, index, self._pool(pool))

    def check(self) -> None:
        """Judge everything opened since the last check, and one slice of the rolling check; before tokens leave."""
        self._expect_closed("check()")
        with torch.inference_mode():
            self._settle()
            if self.config.content == "rolling" and self._compares_content and self._sweeper.is_due(self.step):
                self._fingerprint()
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
        with torch.inference_mode():
            self._settle()
            self._mover.apply(state, self._stages[state], on_host(src), on_host(dst), self.step)

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
            if self.config.content != "write" and self._compares_content:
                self._fingerprint()
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

    def opened(self, substep: SubstepCanary, forward: Forward, hits: Sequence[Hit]) -> Stage | None:
        """The stage of this forward's values; None where nobody compares a draft's bytes."""
        stage = self._stages[forward.pool] if forward.kind != "draft" or self.config.content == "full" else None
        if stage is not None:
            if not stage.fits(len(forward.write_slots)):
                self._settle()
                stage.fingerprint()
            stage.open(forward)
        self._open = substep
        self._pending.append(forward)
        self.report_hits(hits)
        if forward.refused_reads:
            self.report_hits(_refused_reads(forward))
        return stage

    def report_hits(self, hits: Sequence[Hit]) -> None:
        self._hits += hits

    def closed(self) -> None:
        self._open = None

    # the checks

    def _settle(self) -> None:
        """Seal and judge all pending forwards; what fires waits for `_act`."""
        if not self._pending:
            self._mirror.flush()
            return
        forwards, self._pending = self._pending, []
        with torch.inference_mode():
            for forward in forwards:
                forward.read_rows()
                self._hits += judge_layers(forward)
            self._hits += self._sealer.seal(forwards)
            self._mirror.flush()
            for forward in forwards:
                if forward.room or forward.lanes:
                    self._stages[forward.pool].keep(forward)
            self._note_rows(forwards)
            for pool in self._state.pools:
                own = [forward for forward in forwards if forward.pool is pool]
                if own:
                    self._judge(pool, own)

    def _judge(self, pool: PoolState, forwards: Sequence[Forward]) -> None:
        verdict = self._reader.judge(pool, forwards)
        if self.config.content == "full" and self._compares_content:
            verdict.hits += self._check_all_bytes(pool, forwards, verdict)
        self._note_last_good(verdict.hits)
        self._hits += verdict.hits
        coverage = self._coverage
        coverage.forwards += len(forwards)
        coverage.slots_checked += sum(forward.bounds[-1] for forward in forwards)
        coverage.slots_sealed += sum(len(forward.write_slots) for forward in forwards)
        coverage.skip("truth not known to the host", verdict.unknown_truths)

    def _fingerprint(self) -> None:
        for stage in self._stages.values():
            stage.fingerprint()

    def _check_all_bytes(self, pool: PoolState, forwards: Sequence[Forward], verdict: Verdict) -> list[Hit]:
        """content=full: every byte that these forwards have read or written."""
        self._stages[pool].fingerprint()
        slots = joined([self._reader.slots(verdict.segments), *(forward.slots for forward in forwards)])
        self._coverage.bytes_checked += len(slots) * pool.view.slot_bytes
        hits: list[Hit] = []
        if not slots_are_right(pool, slots):
            last = forwards[-1]
            hits = find_changed(
                pool, slots, lambda: _places_of(forwards, verdict), last.site, last.step, both_lanes=False
            )
        for request in {request.uid: request for forward in forwards for request in forward.requests}.values():
            self._sweeper.mark_read(pool, request, self.step)
        return hits

    def _note_rows(self, forwards: Sequence[Forward]) -> None:
        """How far each row of each pool has been written by a forward that is no guess."""
        for forward in forwards:
            if forward.kind == "draft":
                continue
            pool_id, width = forward.pool.pool_id, forward.width
            for number, request in enumerate(forward.requests):
                length = forward.prefixes[number] + forward.written[number * width]
                if forward.kind == "extend":
                    length = min(length, request.committed_len)  # what lies beyond is junk
                request.row_lens[pool_id] = length

    def _note_last_good(self, hits: Sequence[Hit]) -> None:
        """Identity is judged in every forward: an entry that was judged before was good at that time."""
        for hit in hits:
            request = self._ledger.requests.get(hit.request_id or "")
            if request is not None and hit.last_good is None and hit.position is not None:
                judged = request.judged[hit.pool.pool_id]
                if hit.position < judged.length:
                    hit.last_good = judged.step

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

    def _forget_judged(self, request: Request, pages: Sequence[int]) -> None:
        """The row is judged anew, should it go on."""
        size = self._state.page_size
        for pool in self._state.pools:
            for page in pages:
                first = pool.base + page * size
                self._mirror.judged[first : first + size] = False
        request.judged = [Judged()] * len(request.judged)

    def _publish(self, pages: Sequence[int], owner: int) -> None:
        if pages:
            generations = self._ledger.generations
            self._state.set_pages(pages, generations[list(pages)].tolist(), owner)

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


def _places_of(forwards: Sequence[Forward], verdict: Verdict) -> list[Looked]:
    """What is known of every slot that was read, then of every slot that was written."""
    places = [
        Looked(slot, position, segment.request.request_id, None)
        for segment in verdict.segments
        for position, slot in enumerate(segment.slots, segment.first_position)
    ]
    for forward in forwards:
        for entry, (slot, position) in enumerate(zip(forward.write_slots, forward.positions.tolist(), strict=True)):
            name = forward.request_of(forward.row_of_entry(entry)).request_id
            places.append(Looked(slot, position, name, None))
    return places
