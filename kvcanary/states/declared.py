"""Declared: the states of every view that a manager was given, and what stands for pools where there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.violation_log import ViolationLog
from kvcanary.config import CanaryConfig
from kvcanary.errors import PlanError
from kvcanary.ledger.ledger import Ledger
from kvcanary.pools.state_views import StateView
from kvcanary.pools.views import PoolView
from kvcanary.records.state import CanaryState
from kvcanary.states.states import States


def states_of(
    views: Sequence[StateView],
    state: CanaryState,
    seed: int,
    ledger: Ledger,
    violations: ViolationLog,
    coverage: Coverage,
    config: CanaryConfig,
    now: Callable[[], int],
) -> Mapping[str, States]:
    """By name; PlanError where two pools or views have one name."""
    names = [*state.by_name, *(view.name for view in views)]
    if len(set(names)) != len(names):
        raise PlanError(f"pools and states must have different names, got {', '.join(names)}")
    chain_pool = next((pool.pool_id for pool in state.pools if not pool.view.token_offset), 0)
    shared = seed, ledger, violations, coverage, config, now, chain_pool
    return {view.name: States(view, len(state.pools) + number, *shared) for number, view in enumerate(views)}


def no_pool(device: torch.device) -> PoolView:
    """What requests and their chains are kept by in a model without attention; nothing is ever granted in it."""
    return PoolView("no pool", [torch.zeros(2, 1, 1, device=device)], None, 1)
