"""CanaryManager: what an engine holds. Its parts are told of requests, bytes and forwards; a step's order is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from kvcanary.captured.accepted_tokens import CapturedAcceptance
from kvcanary.captured.in_flight import InFlight
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.captured.states import CapturedStates
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.checks.tokens import Oracle, TokenOf
from kvcanary.config import CanaryConfig
from kvcanary.errors import CanaryConfigError, HookOrderError
from kvcanary.ledger.row_truth import RowTruth
from kvcanary.manager.contradictions import Contradictions
from kvcanary.manager.forwards import Forwards, not_one_each
from kvcanary.manager.lifecycle import Lifecycle
from kvcanary.manager.mapped_groups import MappedGroups
from kvcanary.manager.reporting import Reporting
from kvcanary.manager.session import Session
from kvcanary.manager.transfers import Transfers
from kvcanary.pools.attachment import Attachment
from kvcanary.pools.state_views import StateView
from kvcanary.pools.views import PoolView
from kvcanary.ranks.agreement import RanksDisagreeError
from kvcanary.ranks.copies import Copies
from kvcanary.ranks.findings import violation_of
from kvcanary.recorder.recorder import recorded
from kvcanary.records.mailbox import MAX_IN_FLIGHT
from kvcanary.records.state import CanaryState
from kvcanary.report.finding import Finding
from kvcanary.states.declared import no_pool, states_of
from kvcanary.states.states import States

MOST_UNCOLLECTED = 4 * MAX_IN_FLIGHT  # steps that may end before an engine collects one of them, or one behind them


class CanaryManager:
    """The canary of one engine.

    Nothing is checked before `arm()`, everything after it. One pool has one manager: HookOrderError for a second one.

    states: by name of its view, what is told and judged of recurrent states; empty where no StateView was given

    A step, whether its host waits for the device or is behind it:

        begin_step(step)
        expect(...)                                 forwards that are to open their hooks
        forward(kind, index, pool)                  the hooks of one: open, store of each layer, close
        launch_group(...), launch_move(...)        of captured ones, instead
        move(pool, src, dst)                        around bytes that are moved
        flight = end_step()
        collect(flight)                             before a token of the step leaves; check() is both

    Hooks that are methods of a part are documented there: `Lifecycle`, `MappedGroups`, `Transfers`, `Forwards` and
    `Reporting`.
    """

    def __init__(self, config: CanaryConfig, pools: Sequence[PoolView | StateView], holds_back: bool = False) -> None:
        """`pools`: of K and V, and of recurrent states, in any order; a model without attention has states alone.

        `holds_back`: the engine grants a freed page again after `config.quarantine` steps, sooner when it must
        """
        if not config.enabled:
            raise CanaryConfigError("mode 'off' installs nothing: build no manager and pass canary=None")
        config.expect_names_in_memory("a manager")
        own = [pool for pool in pools if isinstance(pool, PoolView)]
        declared = [pool for pool in pools if isinstance(pool, StateView)]
        self._attachment = Attachment([*own, *(view.whole for view in declared)])
        seed = config.drawn_seed()
        state = CanaryState(own or ([no_pool(declared[0].device)] if declared else []), seed)
        session = Session(config, state, config.quarantine if holds_back else 0)
        self.session, self.config = session, config
        self.async_tracker, self.recorder = session.async_tracker, session.recorder
        self.reporting = reporting = Reporting(session)
        self.forwards = forwards = Forwards(session)
        self.lifecycle = lifecycle = Lifecycle(session, reporting, forwards.expected)
        self.mapped_groups = groups = MappedGroups(session, reporting)
        self.transfers = transfers = Transfers(session, self._attachment)
        self._checks, self._ledger, self._log = session.checks, session.ledger, session.recorder.log
        self.states: Mapping[str, States] = {}
        if declared:
            known = session.ledger, session.checks.violations, session.coverage, config, lambda: session.step
            self.states, session.has_states = states_of(declared, state, seed, *known), True
        self._seed = seed
        self._copies: Copies | None = None  # of other ranks
        self._expected, self._num_untold = forwards.expected, 0  # steps that have ended since one was collected

        self.admit, self.release = lifecycle.admit, lifecycle.release
        self.on_weights, self.on_adapter = lifecycle.on_weights, lifecycle.on_adapter
        self.append_all, self.commit_all = lifecycle.append_all, lifecycle.commit_all
        self.on_alloc, self.on_alloc_all, self.on_free = lifecycle.on_alloc, lifecycle.on_alloc_all, lifecycle.on_free
        self.on_share, self.on_acquire, self.on_evict = lifecycle.on_share, lifecycle.on_acquire, lifecycle.on_evict
        self.on_fork, self.on_copy = lifecycle.on_fork, lifecycle.on_copy
        self.on_deduplicate = lifecycle.on_deduplicate
        if not own:  # there are no pages by which a length could be judged, and by which a request ends
            self.commit_all, self.release = lifecycle.commit_states, lifecycle.release_states

        self.on_map, self.on_unmap = groups.on_map, groups.on_unmap
        self.on_swap_out, self.on_swap_in = groups.on_swap_out, groups.on_swap_in

        self.on_load_begin, self.on_load_end = transfers.on_load_begin, transfers.on_load_end
        self.on_load_fail, self.on_restore = transfers.on_load_fail, transfers.on_restore
        self.prepare_load = transfers.prepare_load
        self.on_offload = transfers.on_offload
        self.before_move, self.on_move = transfers.before_move, transfers.on_move
        self.on_cleared, self.on_reallocated = transfers.on_cleared, transfers.on_reallocated

        self.expect, self.forward = forwards.expect, forwards.forward
        self.substep = forwards.forward  # its first name
        self.launch_group, self.launch_move = forwards.launch_group, forwards.launch_move

        self.certificate, self.page_map, self.dump = reporting.certificate, reporting.page_map, reporting.dump
        self.probe_reader = reporting.probe_reader
        self.damaged_pages, self.drilled = reporting.damaged_pages, reporting.drilled
        if config.mode != "raise":
            contradictions = Contradictions(session, lifecycle, reporting)
            contradictions.guard(self)
            session.follow = contradictions.refused_plan

    @property
    def step(self) -> int:
        """The number of the step that runs."""
        return self.session.step

    @property
    def is_armed(self) -> bool:
        """Whether anything is checked."""
        return self.session.is_armed

    @property
    def aborted(self) -> frozenset[str]:
        """Modes abort and heal: running requests that must end, by all that was judged; else nobody.

        Mode heal: those that `heals` names need not end.
        """
        return self.reporting.aborted

    def heals(self, request_id: str) -> bool:
        """Mode heal: whether a request that would end is computed again instead, by an engine that can.

        It gives up its row and all its pages (`release`, `on_free`), without a token of this step, and is admitted
        again with the tokens that have left, once no forward that knows its old row is in flight. True until then.
        """
        return self.reporting.heals(request_id)

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return self.reporting.findings

    @property
    def registry(self) -> SubstepRegistry:
        """Captured forwards, for graphs: add them before `arm()`; `collect()` reads what they found."""
        return self.forwards.registry

    @property
    def judges_behind(self) -> bool:
        """Whether a step that ends now is judged with its results, by `collect`, and the host waits for nothing."""
        return self.session.state.judges_on_device and not self._checks.waits

    @property
    def num_bytes(self) -> int:
        """Device memory that records, fingerprints, page states and what is known of states take; it never grows."""
        states = sum(own.num_bytes for own in self.states.values())
        captured = sum(own.num_bytes for own in self._checks.captured_states)
        return self.session.state.num_bytes + states + captured

    def capture_states(self, name: str, rows: int, nodes: int = 0) -> CapturedStates:
        """The states of this view are judged on the device, with captured forwards: before `arm()`, for good.

        rows: most of one forward;  nodes: most of a tree of a verify, 0: none
        """
        if self.is_armed:
            raise HookOrderError(f"capture_states() must come before arm(): states {name!r} are late")
        own, pools = self.states[name], self.session.state.pools
        pool = next((pool for pool in pools if not pool.view.token_offset), pools[0])
        shared = self._ledger, self.session.coverage, self.config
        captured = CapturedStates(self.registry, pool, own.view, own.pool.pool_id, self._seed, rows, nodes, *shared)
        self._checks.captured_states.append(captured)
        return captured

    def arm(self) -> None:
        """After warm-up and capture, before the first request: from now on everything is checked."""
        session = self.session
        if session.is_armed:
            raise HookOrderError("arm() comes once: this canary is armed already")
        session.is_armed = True
        if session.state.judges_on_device:
            session.on_device()
        if self._checks.captured is not None:  # no buffers are made from now on but for forwards that come once
            self._checks.captured.registry.arm()
        self._checks.prepare()
        for poisoner in session.poisoners:
            poisoner.prepare()
        self.recorder.start(session.step)
        self.reporting.dumper.listen()

    def detach(self) -> None:
        """The engine is gone: its pools may have another canary."""
        self._attachment.release()
        self.reporting.dumper.close()

    def set_oracle(self, token_of: TokenOf | None, judges_guesses: bool = False) -> None:
        """W6 judges what the host does not know yet by `token_of(request_id, position)`; None: by nobody, as at first.

        The function gives None where it does not know. `judges_guesses`: draft forwards and tree nodes too.
        """
        self._checks.rules.oracle = None if token_of is None else Oracle(token_of, judges_guesses)

    # the step

    def begin_step(self, step: int) -> None:
        """Steps are numbered upwards; forwards, checks and findings carry the number."""
        session = self.session
        if session.open:
            raise session.not_closed("begin_step()")
        if step <= session.step:
            self.reporting.count_reads()
            if session.coverage.forwards:
                raise HookOrderError(f"begin_step() must count upwards: step {step} follows step {session.step}")
        if self._num_untold > MOST_UNCOLLECTED:
            self._tell_uncollected()
        if self._expected.due:
            self._checks.report(self._expected.missing())
        self._log.append(("begin_step", step))
        session.step = session.async_tracker.step = step
        self._checks.begin_step(step)
        if self._ledger.quarantined.waiting:
            self._ledger.leave_quarantine(step, session.quarantine)

    @contextmanager
    def move(self, pool: str, src: Tensor, dst: Tensor, to: str | None = None, guesses: bool = False) -> Iterator[None]:
        """Bytes are moved within this block, every source read before any destination is written: the records follow.

        src, dst: slots, [n] int64; `to`, `guesses`: as of `Transfers.on_move`
        """
        self.before_move()
        yield
        self.on_move(pool, src, dst, to, guesses)

    def end_step(self, is_waited_for: bool = False) -> InFlight:
        """All forwards of the step are launched: what the host has to judge is judged, what a device found is sent for.

        Waits for nothing but that; the slice of the rolling check goes with it. A forward that was announced and has
        no hooks is judged here: what earlier steps have to give may leave still.
        is_waited_for: the host waits for all that its stream was given so far by itself, before it calls `collect`
        """
        session, checks = self.session, self._checks
        if session.open:
            raise session.not_closed("end_step()")
        self._num_untold += 1
        self._log.append(("end_step", session.step))
        is_judged_here = checks.waits
        if is_judged_here:
            checks.judge_pending()
        if missing := self._expected.due:
            checks.report(self._expected.missing())
        flight = checks.send(is_waited_for)
        if is_judged_here or checks.has_nothing_there(flight):
            checks.collect(flight)
        elif missing:
            self.reporting.act()
        self._prepare_freed_pages()
        return flight

    def collect(self, flight: InFlight) -> frozenset[str]:
        """Judge a step that has ended, and those before it, before a token of it leaves; waits for it alone.

        Steps of which no token leaves are collected too: a `begin_step` with more than MOST_UNCOLLECTED steps behind it
        of which none was is a HookOrderError.
        Mode abort: the requests that must end now, without a token of this step; else nobody.
        """
        if self.session.open:
            raise self.session.not_closed("collect()")
        self._num_untold = 0
        self._log.append(("collect", flight.step))
        flight.is_over = True  # but for re-reads
        if not flight.is_collected:
            self._checks.collect(flight)
        aborted = self.reporting.conclude()
        if flight.violations and self.reporting.error is not None:  # collected before its turn, it stopped the engine
            raise self.reporting.error
        return aborted

    def check(self) -> frozenset[str]:
        """`end_step` and `collect` at once, by a host that waits for every step; answers as `collect` does."""
        return self.collect(self.end_step())

    def check_forwards(self) -> frozenset[str]:
        """Behind forwards that run when the step has been judged, before its tokens leave: all that were announced must
        have opened their hooks; answers as `collect` does.
        """
        session = self.session
        if session.open:
            raise session.not_closed("check_forwards()")
        if not self._expected.due:
            return self.aborted
        self._log.append(("check_forwards",))
        self._checks.judge_pending()
        self._checks.report(self._expected.missing())
        return self.reporting.act()

    def judge_copies(self) -> frozenset[str]:
        """Judge what was declared of copies since the last step (O1), before what they brought is used.

        Mode abort: the requests that must end now; nobody where every copy was waited for.
        """
        if not self.async_tracker.has_reported:
            return frozenset()
        self._log.append(("judge_copies",))
        self.async_tracker.has_reported = False
        return self.reporting.act()

    @recorded
    def drain(self, cached: Sequence[int] | None = None) -> frozenset[str]:
        """At idle and shutdown: judge what is still pending; the answer is that of `collect`.

        cached: pages that the engine's prefix cache names now
        PageReferenceError where rows and reference counts disagree, or the cache and what was published.
        """
        self.session.expect_closed("drain()")
        self._num_untold = 0
        self._checks.judge_pending()
        self._checks.report(self._expected.missing())
        self._ledger.rows.audit(cached)
        return self.reporting.act()

    def rest(self) -> frozenset[str]:
        """Between steps, and now and then where there are none: cached pages that nobody has read for long.

        The answer is that of `collect`. An engine may call it after every step.
        """
        pages = self._checks.cached.overdue()
        return self.sweep_cached(pages) if pages else self.aborted

    @recorded
    def sweep_cached(self, pages: Sequence[int]) -> frozenset[str]:
        """Re-read the bytes of these cached pages now; the answer is that of `collect`."""
        self.session.expect_closed("sweep_cached()")
        self._checks.judge_pending()
        self._checks.reread_pages(pages, self.session.step)
        return self.reporting.act()

    # other ranks of the same engine

    @property
    def seed_id(self) -> str:
        """Which seed the keys are of, without it."""
        return self.session.state.keys.seed_id

    def copies(self, num_ranks: int) -> Copies:
        """What so many ranks hold more than once, to be compared with `kvcanary.ranks.Agreement`; before `arm()`."""
        self.session.has_ranks, copies = True, Copies(self.session.state.pools, num_ranks)
        self._copies = copies
        return copies

    def ranks_differ(self, error: RanksDisagreeError) -> frozenset[str]:
        """Tell what an agreement has found (X1, X2), behind a step; the answer is that of `collect`.

        KVCorruptionError but in mode log: nobody can tell whose requests are touched.
        """
        self.session.expect_closed("ranks_differ()")
        place = None if self._copies is None else self._copies.place_of(error)
        self._checks.report([violation_of(error, self.session.state.pools[0], place)])
        return self.reporting.act()

    # one of what the parts are told of many

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens that were accepted for this request; where the device has reported of them, the same are expected."""
        self.append_all((request_id,), (token_ids,))

    def commit(self, request_id: str, committed_len: int) -> None:
        """Entries [0, committed_len) of the row are final; at acceptance, be the step checked already or not."""
        self.commit_all((request_id,), (committed_len,))

    def launch(
        self, substep: CapturedSubstep, request_ids: Sequence[str], written: Sequence[int], reads: int
    ) -> RowTruth:
        """A captured forward of these requests runs next, the live rows of its bucket in this order.

        written: by request, entries that each of its rows writes; reads: entries that all rows read. What is returned
        goes into the forward's buffers before it runs, one value for each row of a request.
        """
        return self.launch_all([substep], request_ids, written, [reads])

    def launch_all(
        self,
        substeps: Sequence[CapturedSubstep],
        request_ids: Sequence[str],
        written: Sequence[int] | None,
        reads: Sequence[int],
        acceptance: CapturedAcceptance | None = None,
    ) -> RowTruth:
        """The same for forwards of one kind and pool that run one behind the other: their truth is the same.

        written: of each of them; reads: by forward. Where the engine launches a step before it has declared the last
        one (`launch_accepted`), reads are those of the lengths that it has declared, and written is None, with an
        `acceptance`.
        """
        captured = self._checks.captured
        if captured is None:
            raise HookOrderError(f"launch() needs substeps of this manager's registry, got {substeps[0]}")
        launch_group = captured.registry.launch_group(substeps, acceptance=acceptance)
        if (written is None) != (acceptance is not None):
            raise not_one_each(launch_group, len(request_ids), reads, written)
        return RowTruth(self.launch_group(launch_group, request_ids, written or (), reads), captured.registry.now)

    def launch_accepted(
        self, substep: CapturedSubstep, request_ids: Sequence[str], reads: int, acceptance: CapturedAcceptance
    ) -> RowTruth:
        """As `launch`, for a forward that writes the entries of what a captured step of these requests has accepted.

        Only the device knows how many. The canary's ledger goes on by its word when the step is judged, before anything
        behind it is, and `append` and `commit` have to say the same when the engine has collected the step.
        """
        return self.launch_all([substep], request_ids, None, [reads], acceptance)

    # helpers

    def _tell_uncollected(self) -> None:
        """What was found in steps that nobody collects is told all the same; then HookOrderError."""
        count, self._num_untold = self._num_untold, 0
        self._checks.judge_pending()
        self.reporting.act()
        raise HookOrderError(
            f"begin_step() must wait for collect(): {count} steps have ended since the last one that was collected, at "
            f"most {MOST_UNCOLLECTED} may: call collect(flight) of every step, also where no token of it leaves"
        )

    def _prepare_freed_pages(self) -> None:
        """For the next step, which then begins at once; the device still computes this one."""
        if self._ledger.quarantined.waiting:
            self._ledger.leave_quarantine(self.session.step + 1, self.session.quarantine)
        for poisoner in self.session.poisoners:
            if poisoner.waiting or poisoner.credit:
                poisoner.tick()
