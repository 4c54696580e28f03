"""CanaryManager: what an engine holds. It owns the state, hands out substeps, and runs the checks of a step at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvcanary.attachment import Attachment
from kvcanary.certificate import Coverage, certificate
from kvcanary.checks import StepChecks
from kvcanary.config import CanaryConfig
from kvcanary.describe import Describer
from kvcanary.errors import CanaryConfigError, HookOrderError, LifetimeError, PlanError
from kvcanary.findings import Finding
from kvcanary.forward import Forward, on_host
from kvcanary.intake import HitBatch
from kvcanary.ledger import NO_PAGE, Judged, Ledger, Request
from kvcanary.poisoning import Poisoner
from kvcanary.response import Response
from kvcanary.sites import SUBSTEP_KINDS
from kvcanary.staging import Stage
from kvcanary.state import CanaryState, PoolState
from kvcanary.substep import SubstepCanary, WarmupSubstep
from kvcanary.truths import judge_commit
from kvcanary.views import PoolView
from kvcanary_kernels.record import NO_OWNER


class CanaryManager:
    """The canary of one engine. See the method names in the order in which an engine calls them.

    Nothing is checked before `arm()`, everything after it. One pool has one manager: HookOrderError for a second one.
    """

    def __init__(self, config: CanaryConfig, pools: Sequence[PoolView]) -> None:
        if not config.enabled:
            raise CanaryConfigError("mode 'off' installs nothing: build no manager and pass canary=None")
        self.config = config
        self.step = 0
        self.is_armed = False
        seed = secrets.randbits(64) if config.seed is None else config.seed
        self._state = CanaryState(pools, seed)
        self._ledger = self._new_ledger()
        self._coverage = Coverage()
        self._checks = StepChecks(self._state, self._ledger, config, self._coverage)
        self._poisoner = Poisoner(self._state, config.poison, self._coverage)
        self._response = Response(config, self._ledger, Describer(self._state, self._ledger))
        self._open: SubstepCanary | None = None
        self._doomed: frozenset[str] = frozenset()
        self._attachment = Attachment(pools)

    def arm(self) -> None:
        """After warm-up and capture, before the first request: from now on everything is checked."""
        if self.is_armed:
            raise HookOrderError("arm() comes once: this canary is armed already")
        self.is_armed = True

    def detach(self) -> None:
        """The engine is gone: its pools may have another canary."""
        self._attachment.release()

    # requests and pages

    def admit(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request with its prompt: the host truth of its rows starts."""
        if not self.is_armed:
            raise HookOrderError(
                f"request {request_id!r} is admitted by a canary that was never armed: "
                "call arm() after warm-up and capture, before the first request"
            )
        self._ledger.admit(request_id, token_ids, self.step)

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens that were accepted for this request."""
        self._ledger.append(request_id, token_ids, self.step)

    def on_alloc(self, request_id: str, pages: Sequence[int]) -> None:
        """Pages granted, in row order: the row's page i holds positions [i * page_size, (i + 1) * page_size)."""
        self._checks.settle_writes_into(pages)
        self._ledger.grant(request_id, pages, self.step)
        self._publish(pages, self._ledger.request(request_id).uid)
        self._checks.hits += self._poisoner.granted(pages, self.step)

    def on_free(self, request_id: str, pages: Sequence[int]) -> None:
        """Pages given back; from now on nobody may read them."""
        self._checks.settle()
        request = self._ledger.request(request_id)
        if not request.released or self.config.content == "write":
            self._count_unread(request, pages)
        self._ledger.free(request_id, pages, self.step)
        self._checks.forget(pages)
        request.judged = [Judged()] * len(request.judged)
        self._publish(pages, NO_OWNER)
        self._poisoner.freed(pages)
        if request.released and not request.pages:
            self._ledger.forget(request_id)

    # the step

    def begin_step(self, step: int) -> None:
        """Steps are numbered upwards; substeps, checks and findings carry the number."""
        self._expect_closed("begin_step()")
        if step <= self.step and self._coverage.forwards:
            raise HookOrderError(f"begin_step() must count upwards: step {step} follows step {self.step}")
        self.step = step

    def substep(self, kind: str, index: int, pool: str) -> SubstepCanary | WarmupSubstep:
        """The hooks of the next forward."""
        if self._open is not None:
            self._expect_closed(f"substep({kind!r})")
        if kind not in SUBSTEP_KINDS:
            raise PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {kind!r}")
        state = self._pool(pool)
        return SubstepCanary(self, kind, index, state) if self.is_armed else WarmupSubstep()

    def check(self) -> frozenset[str]:
        """Judge everything opened since the last check, and one slice of the rolling check; before tokens leave.

        Mode abort: the requests that must end now, without a token of this step; else nobody.
        """
        self._expect_closed("check()")
        self._checks.settle()
        self._checks.roll(self.step)
        self._poisoner.tick()
        self._coverage.peak_live_bytes = max(self._coverage.peak_live_bytes, self._live_bytes())
        return self._act()

    def drain(self) -> frozenset[str]:
        """At idle and shutdown: judge what is still pending; the answer is that of `check`."""
        self._expect_closed("drain()")
        self._checks.settle()
        return self._act()

    def on_move(self, pool: str, src: Tensor, dst: Tensor) -> None:
        """Bytes were moved, every source read before any destination was written: the records follow."""
        self._expect_closed("on_move()")
        self._checks.move(self._pool(pool), on_host(src), on_host(dst), self.step)

    def commit(self, request_id: str, committed_len: int) -> None:
        """Entries [0, committed_len) of the row are final."""
        request = self._ledger.request(request_id)
        if committed_len < request.committed_len:
            raise LifetimeError(
                f"committed_len of {request_id!r} must not shrink, {committed_len} follows {request.committed_len}"
            )
        self._checks.hits += judge_commit(request, self._state.pools, committed_len, self.step)
        for pool in self._state.pools:
            self._checks.sweeper.commit(request, pool)
        request.committed_len, request.commit_step = committed_len, self.step

    def release(self, request_id: str) -> bool:
        """The request ends, before its last tokens leave: judge what is pending, and look at all its bytes again.

        Mode abort: False where these are not what was written; the request ends as corrupted, without those tokens.
        """
        self._expect_closed("release()")
        request = self._ledger.request(request_id)
        self._checks.look_again(request, self.step)
        is_intact = request_id not in self._act()
        request.released = True
        return is_intact

    # what was found

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return self._response.log.findings

    def certificate(self) -> dict[str, Any]:
        """What was checked, what was not and why; plain JSON."""
        coverage, sweeper = self._coverage, self._checks.sweeper
        self._count_reads()
        coverage.max_unread_steps = max(sweeper.longest_wait, sweeper.waiting(self.step))
        groups = [group.to_dict() for group in self._response.log.groups.values()]
        return certificate(self.config, coverage, self._live_bytes(), self._state.keys.seed_id, groups)

    # called by substeps

    def requests_of(self, request_ids: Sequence[str]) -> list[Request]:
        requests = self._ledger.requests
        try:
            return [requests[request_id] for request_id in request_ids]
        except KeyError:
            return [self._ledger.request(request_id) for request_id in request_ids]

    def opened(self, substep: SubstepCanary, forward: Forward, hits: Sequence[HitBatch]) -> Stage | None:
        """The stage of this forward's values; None where nobody compares them."""
        stage = self._checks.open(forward)
        self._open = substep
        self.report_hits(hits)
        return stage

    def report_hits(self, hits: Sequence[HitBatch]) -> None:
        self._checks.hits += hits

    def closed(self) -> None:
        self._open = None

    # helpers

    def _act(self) -> frozenset[str]:
        """Respond to what fired; the running requests that must end, also those named before."""
        groups = self._checks.hits.take()
        if groups:
            self._count_reads()
            self._checks.look_around(groups)
            self._doomed |= self._response.act(groups, self.step, self._coverage)
        if self._doomed:
            requests = self._ledger.requests
            self._doomed = frozenset(name for name in self._doomed if name in requests and not requests[name].released)
        return self._doomed

    def _new_ledger(self) -> Ledger:
        state = self._state
        return Ledger(
            num_pages=state.generations.shape[0],
            page_size=state.page_size,
            null_pages=-(-max(pool.view.null_slots for pool in state.pools) // state.page_size),
            keys=state.keys,
            roles=[(pool.name, pool.view.token_offset) for pool in state.pools],
        )

    def _pool(self, name: str) -> PoolState:
        pool = self._state.by_name.get(name)
        if pool is None:
            raise PlanError(f"pool must be one of {', '.join(self._state.by_name)}, got {name!r}")
        return pool

    def _expect_closed(self, what: str) -> None:
        if self._open is not None:
            raise HookOrderError(f"{what} must wait for close() of {self._open}")

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
        sweeper = self._checks.sweeper
        self._coverage.bytes_checked += sweeper.bytes_read
        sweeper.bytes_read = 0

    def _live_bytes(self) -> int:
        return sum(
            request.final_len(pool.pool_id) * pool.view.slot_bytes
            for request in self._ledger.requests.values()
            for pool in self._state.pools
            if not request.released
        )
