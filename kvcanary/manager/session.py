"""Session: what the parts of one manager share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.set_aside import Excluded
from kvcanary.captured.step import CapturedStep
from kvcanary.config import CanaryConfig
from kvcanary.errors import ContradictionError, HookOrderError, LifetimeError, PlanError
from kvcanary.ledger.ledger import Ledger, Role
from kvcanary.manager.step import StepChecks
from kvcanary.pools.launch_site import site_name
from kvcanary.pools.plans import ReadPlan, WritePlan
from kvcanary.recorder.checkpoint import ManagerState
from kvcanary.recorder.recorder import Recorder
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.poison import Poisoner
from kvcanary.transfers.async_tracker import AsyncTracker

Refusal = LifetimeError | ContradictionError  # of a plan
Where = tuple[str, int, PoolState]  # kind, index and pool of a forward
FollowPlan = Callable[[Refusal, Where, ReadPlan, WritePlan], tuple[Tensor, Tensor] | None]


class Session:
    """The state of a canary, and where its step stands.

    step:      the number of the one that runs
    open:      forwards whose hooks wait for their close; several where the layers of one model lie in pools of several
               groups
    follow:    what a forward may use all the same whose plans were refused (`Contradictions`); None: that is an error
    async_tracker:   asynchronous operations, and who must wait for them
    poisoner:  of pages in pools that lie as plans name them; mapped: by group behind a slot map
    undeclared:    by such a group, whether no `on_map` has told of it
    has_registry:  whether somebody asked for captured forwards, and so has padding that may be judged
    has_states:    whether recurrent states are watched;  has_ranks: whether other ranks are compared
    """

    def __init__(self, config: CanaryConfig, state: CanaryState, quarantine: int) -> None:
        """`quarantine`: steps after which the engine grants a freed page again."""
        self.config, self.state, self.quarantine = config, state, quarantine
        self.step, self.is_armed, self.has_registry, self.has_states, self.has_ranks = 0, False, False, False, False
        self.open: list[Where] = []
        self.follow: FollowPlan | None = None
        self.ledger = Ledger(
            num_pages=state.generations.shape[0],
            page_size=state.page_size,
            null_pages=-(-max(pool.view.null_slots for pool in state.pools) // state.page_size),
            keys=state.keys,
            roles=[Role(pool.view.root_name, pool.view.token_offset, pool.view.ahead) for pool in state.pools],
        )
        state.bind(self.ledger.pages)
        for pool in state.pools:
            pool.asks_finite = "N1" not in config.disable
        self.coverage = Coverage()
        self.excluded = Excluded(self.coverage)
        self.checks = checks = StepChecks(state, self.ledger, config, self.coverage, self.excluded)
        self.async_tracker = AsyncTracker(self.ledger, state.pools[0], checks.report)
        reported = config.poison, self.coverage, checks.rereads, checks.tails
        groups = {pool.view.group for pool in state.pools if pool.view.slot_map is not None}
        self.poisoner = Poisoner(state, state.pools_of(None), *reported)
        self.mapped = {group: Poisoner(state, state.pools_of(group), *reported) for group in groups}
        self.poisoners = self.poisoner, *self.mapped.values()
        self.undeclared = dict.fromkeys(self.mapped, True)
        self.recorder = self._make_recorder()

    def _make_recorder(self) -> Recorder:
        """It is told of whatever the checks find, and of asynchronous operations."""
        checks, async_tracker = self.checks, self.async_tracker
        manager_state = ManagerState(
            self.state, self.ledger, checks, async_tracker, self.poisoner, self.mapped, self.undeclared
        )
        recorder = Recorder(manager_state, self.config.ring)
        checks.violations.watch = recorder.fired
        checks.rules.judged, checks.proved = recorder.forwards.judged, recorder.forwards.proved
        checks.collecting = recorder.forwards.collecting
        async_tracker.note, async_tracker.log = recorder.note, recorder.log
        return recorder

    def pool(self, name: str) -> PoolState:
        """PlanError where there is none of this name."""
        pool = self.state.by_name.get(name)
        if pool is None:
            raise PlanError(f"pool must be one of {', '.join(self.state.by_name)}, got {name!r}")
        return pool

    def on_device(self) -> CapturedStep:
        """What judges forwards that judge themselves there: made for the first of them."""
        checks = self.checks
        if checks.captured is None:
            checks.captured = captured = CapturedStep(self.state, self.ledger, self.coverage, self.recorder.forwards)
            captured.registry.compares_moves = checks.mover.compares_content
            captured.registry.compares_reads = checks.is_full
        return checks.captured

    def expect_closed(self, what: str) -> None:
        """HookOrderError while hooks are open."""
        if self.open:
            raise self.not_closed(what)

    def not_closed(self, what: str) -> HookOrderError:
        """What `expect_closed` raises, where a step looks at `open` itself: one call fewer."""
        kind, index, pool = self.open[-1]
        return HookOrderError(f"{what} must wait for close() of {site_name(kind, index)} of the {pool.name} pool")

    def note_live_bytes(self) -> None:
        """Before they become fewer, and where somebody asks for the most that there were."""
        self.coverage.peak_live_bytes = max(self.coverage.peak_live_bytes, self.checks.scrubber.live_bytes())
