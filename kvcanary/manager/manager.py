"""CanaryManager: what an engine holds. It owns the state, hands out substeps, and runs the checks of a step at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from torch import Tensor

from kvcanary.calls.forward import Forward
from kvcanary.calls.violation import Hit
from kvcanary.calls.violation_log import HitBatch
from kvcanary.captured.in_flight import InFlight
from kvcanary.checks.admission import refuse
from kvcanary.checks.tokens import Oracle, TokenOf
from kvcanary.config import CanaryConfig
from kvcanary.errors import CanaryConfigError, ContradictionError, HookOrderError, LifetimeError, PlanError
from kvcanary.ledger.accounting import audit
from kvcanary.ledger.ledger import Request
from kvcanary.manager.contradictions import Contradictions
from kvcanary.manager.device_substep import DeviceSubstep
from kvcanary.manager.reporting import Reporting
from kvcanary.manager.substep import SubstepCanary, WarmupSubstep
from kvcanary.pools.attachment import Attachment
from kvcanary.pools.launch_site import SUBSTEP_KINDS
from kvcanary.pools.plans import (
    ReadPlan,
    WritePlan,
)
from kvcanary.pools.views import PoolView
from kvcanary.recorder.recorder import recorded
from kvcanary.records.state import CanaryState, PoolState


class CanaryManager(Reporting):
    """The canary of one engine. See the method names in the order in which an engine calls them.

    Nothing is checked before `arm()`, everything after it. One pool has one manager: HookOrderError for a second one.
    """

    def __init__(self, config: CanaryConfig, pools: Sequence[PoolView], holds_back: bool = False) -> None:
        """`holds_back`: the engine grants a freed page again after `config.quarantine` steps, sooner when it must."""
        if not config.enabled:
            raise CanaryConfigError("mode 'off' installs nothing: build no manager and pass canary=None")
        self._attachment = Attachment(pools)
        seed = secrets.randbits(64) if config.seed is None else config.seed
        super().__init__(config, CanaryState(pools, seed), holds_back)
        self._judges_there = judges_on_device(self._state)
        self._contradictions = None if config.mode == "raise" else Contradictions(self)

    def arm(self) -> None:
        """After warm-up and capture, before the first request: from now on everything is checked."""
        if self.is_armed:
            raise HookOrderError("arm() comes once: this canary is armed already")
        self.is_armed = True
        if self._judges_there:
            self._on_device()
        if self._static is not None:
            self._static.bank.arm()
        self._checks.prepare()
        for poisoner in self._poisoners:
            poisoner.prepare()
        self.recorder.start(self.step)
        self._dumper.listen()

    def detach(self) -> None:
        """The engine is gone: its pools may have another canary."""
        self._attachment.release()
        self._dumper.close()

    def set_oracle(self, token_of: TokenOf | None, judges_guesses: bool = False) -> None:
        """W6 judges what the host does not know yet by `token_of(request_id, position)`; None: by nobody, as at first.

        The function gives None where it does not know. `judges_guesses`: draft forwards and tree nodes too.
        """
        self._checks.oracle = None if token_of is None else Oracle(token_of, judges_guesses)

    # the step

    def begin_step(self, step: int) -> None:
        """Steps are numbered upwards; substeps, checks and findings carry the number."""
        if self._open:
            raise self._not_closed("begin_step()")
        if step <= self.step and self._has_forwards():
            raise HookOrderError(f"begin_step() must count upwards: step {step} follows step {self.step}")
        if self._expected.due:
            self._checks.report(self._expected.missing())
        self._log.append(("begin_step", step))
        self.step = self.tickets.step = step
        self._checks.begin_step(step)
        if self._ledger.quarantined.waiting:
            self._ledger.leave_quarantine(step, self._quarantine)

    @property
    def may_depart(self) -> bool:
        """Whether a host that hears of its steps later may call `depart` now and wait for nothing.

        All that was opened since the last check judges itself on the device.
        """
        return self._judges_there and not self._checks.waits

    def substep(self, kind: str, index: int, pool: str, puts: bool = False) -> SubstepCanary | WarmupSubstep:
        """The hooks of the next forward; of one whose layers lie in pools of several groups, one substep a group.

        `puts`: every layer is offered to the substep's `put` before the engine stores it. On a GPU such a forward
        judges itself there, if its rows are chains: the host hears of it with the captured ones, by `check` or `hear`.
        """
        if self._open and not all(substep.is_beside(kind, index, self._pool(pool)) for substep in self._open):
            self._expect_closed(f"substep({kind!r})")
        if kind not in SUBSTEP_KINDS:
            raise PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {kind!r}")
        state = self._pool(pool)
        if not self.is_armed:
            return WarmupSubstep()
        return (DeviceSubstep if puts and self._judges_there else SubstepCanary)(self, kind, index, state)

    @recorded
    def check(self) -> frozenset[str]:
        """Judge everything opened since the last check, and one slice of the rolling check; before tokens leave.

        Mode abort: the requests that must end now, without a token of this step; else nobody.
        """
        if self._open:
            raise self._not_closed("check()")
        self._checks.land_replays()
        self._checks.settle()
        if self._expected.due:
            self._checks.report(self._expected.missing())
        self._checks.report(self._checks.roll(self.step))
        self._checks.land()
        self._prepare_freed_pages()
        return self._conclude()

    def depart(self, is_waited_for: bool = False) -> InFlight:
        """Instead of `check`, by a host that hears of its steps later: captured forwards of this step were launched.

        What they found, and the step's slice of the rolling check, comes to the host behind them; `hear` judges it. A
        forward that was announced and has no hooks is judged here: what earlier steps have to give may leave still.
        is_waited_for: the host waits for all that its stream was given so far by itself, before it calls `hear`
        """
        if self._open:
            raise self._not_closed("depart()")
        self._log.append(("depart", self.step))
        flight = self._checks.depart(is_waited_for)
        if self._expected.due:
            self._checks.report(self._expected.missing())
            self._act()
        self._prepare_freed_pages()
        return flight

    def hear(self, flight: InFlight) -> frozenset[str]:
        """Judge a step that has departed, and those before it, before a token of it leaves; answers as `check` does.

        Waits for nothing but the step itself.
        """
        if self._open:
            raise self._not_closed("hear()")
        self._log.append(("hear", flight.step))
        flight.is_over = True  # but for looks
        if not flight.has_landed:
            self._checks.land(flight)
        doomed = self._conclude()
        if flight.hits and self._error is not None:  # it had to land before its turn, and stopped the engine then
            raise self._error
        return doomed

    def check_forwards(self) -> frozenset[str]:
        """Behind forwards that run when the step has been judged, before its tokens leave: all that were announced must
        have opened their hooks; answers as `check` does.
        """
        if self._open:
            raise self._not_closed("check_forwards()")
        if not self._expected.due:
            return self.doomed
        self._log.append(("check_forwards",))
        self._checks.settle()
        self._checks.report(self._expected.missing())
        return self._act()

    def judge_copies(self) -> frozenset[str]:
        """Judge what was told of copies since the last check (O1), before what they brought is used.

        Mode abort: the requests that must end now; nobody where every copy was waited for.
        """
        if not self.tickets.has_told:
            return frozenset()
        self._log.append(("judge_copies",))
        self.tickets.has_told = False
        return self._act()

    @recorded
    def drain(self) -> frozenset[str]:
        """At idle and shutdown: judge what is still pending; the answer is that of `check`.

        PageReferenceError where rows and reference counts disagree.
        """
        self._expect_closed("drain()")
        self._checks.settle()
        self._checks.report(self._expected.missing())
        audit(self._ledger)
        return self._act()

    def rest(self) -> frozenset[str]:
        """Between steps, and now and then where there are none: cached pages that nobody has looked at for long.

        The answer is that of `check`. An engine may call it after every step.
        """
        pages = self._checks.cached.overdue()
        return self.sweep_cached(pages) if pages else self.doomed

    @recorded
    def sweep_cached(self, pages: Sequence[int]) -> frozenset[str]:
        """Look at the bytes of these cached pages now; the answer is that of `check`."""
        self._expect_closed("sweep_cached()")
        self._checks.settle()
        self._checks.look_at_pages(pages, self.step)
        return self._act()

    @recorded
    def release(self, request_id: str, committed_len: int | None = None) -> bool:
        """The request ends, before its last tokens leave: judge what is pending, and look at all its bytes again.

        committed_len: where it ended inside what was accepted (a stop string), entries that are its own: pages behind
                       them are not final, and no cache may take them. Forwards that still have the request in their
                       batch are judged by all that was committed, until its pages are freed.
        Mode abort: False where these are not what was written; the request ends as corrupted, without those tokens.
        """
        self._expect_closed("release()")
        request = self._ledger.request(request_id)
        if committed_len is not None and not 0 <= committed_len <= request.committed_len:
            raise LifetimeError(
                f"committed_len of {request_id!r} must be in [0, {request.committed_len}] when it ends, got "
                f"{committed_len}: commit first"
            )
        self._checks.look_again(request, self.step)
        if committed_len is not None:
            request.owned_len = committed_len
            request.final_pages = min(request.final_pages, committed_len // self._state.page_size)
        is_intact = request_id not in self._act()
        self._note_live_bytes()
        request.released = True
        return is_intact

    @recorded
    def on_evict(self, pages: Sequence[int]) -> None:
        """A prefix cache gives up pages that no row names; what a last look finds is not their next owner's."""
        self._checks.settle()
        self._checks.look_at_pages(pages, self.step)
        self.tickets.freed(pages)
        self._ledger.evict(pages, self.step)
        self._leave(pages)
        self._response.damaged_pages.difference_update(pages)
        if self.config.mode != "raise":  # else the check of the step stops the engine
            self._act()

    @recorded
    def on_unmap(self, group: str, pages: Sequence[int], own_pages: Sequence[int]) -> None:
        """The group gives up its own pages, the full ones may stay. Told while the map still leads there.

        What is final in them is read once more, and what that finds acts at once, before their next owner writes.
        Then they are nobody's, and poisoned.
        """
        poisoner = self._of_group(group)
        self._checks.settle()
        if fired := self._checks.look_at_leaving(group, pages, self.step):
            self._act()
        poisoner.freed(own_pages, fired or self._are_damaged(pages))

    # called by substeps

    def requests_of(self, request_ids: Sequence[str]) -> list[Request]:
        """Those of a forward that is judged by what the host knows now: all that was accepted for them, too."""
        requests = self._ledger.known(request_ids)
        if any(request.unlanded for request in requests):
            self._checks.land()
        return requests

    def opened(self, substep: SubstepCanary, forward: Forward) -> None:
        hits: Sequence[Hit | HitBatch] = ()
        if not forward.is_usable:
            hits = refuse(forward, self._ledger.pages, self.config.disable)
        is_announced = self._expected.opened((forward.kind, forward.index, forward.pool.name), forward.step)
        if not is_announced and forward.kind == "draft":
            hits = [*hits, *self._expected.left_out(forward)]
        self._checks.open(forward)
        self._open.append(substep)
        self.recorder.opened(forward)
        if hits:
            self.report_hits(hits)

    def refused_plan(
        self, substep: SubstepCanary, error: LifetimeError | ContradictionError, read: ReadPlan, write: WritePlan
    ) -> tuple[Tensor, Tensor] | None:
        """The error in mode raise; else what a forward that nobody judges may use, None: open it again."""
        if self._contradictions is None:
            raise error
        safe = self._contradictions.refused_plan(error, substep.site, substep.pool_name, read, write)
        if safe is not None:
            self._expected.opened((*substep.site, substep.pool_name), self.step)
            self._open.append(substep)
        return safe

    def report_hits(self, hits: Sequence[Hit | HitBatch]) -> None:
        self._checks.report(hits)

    def closed(self, substep: SubstepCanary, pool: PoolState, is_judged: bool = True) -> None:
        if is_judged:
            self.recorder.closed(pool.name)
        self._open.remove(substep)

    # helpers

    def _has_forwards(self) -> bool:
        """Whether any was judged."""
        self._count_reads()
        return self._coverage.forwards > 0

    def _prepare_freed_pages(self) -> None:
        """For the next step, which then begins at once; the device still computes this one."""
        if self._ledger.quarantined.waiting:
            self._ledger.leave_quarantine(self.step + 1, self._quarantine)
        for poisoner in self._poisoners:
            if poisoner.waiting or poisoner.credit:
                poisoner.tick()


def judges_on_device(state: CanaryState) -> bool:
    """Whether forwards may judge themselves: on a GPU, where all rows of all pools lie as plans name them."""
    return state.records.is_cuda and not any(pool.is_partial for pool in state.pools)
