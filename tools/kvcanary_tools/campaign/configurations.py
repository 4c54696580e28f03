"""The configurations of a campaign: `quick` for every commit, `full` for the matrix of docs/faults.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcanary.faults.fault import Fault
from kvcanary.faults.target import Setup

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Plan:
    """Setups by name, and runs by kind: of a fault over its configurations, of clean twins one a configuration and
    seed.

    embedded: runs of a fault that must be on the embedded model, where it applies to that.
    is_measured: runs in which a fault could not be made are made up for, and there must be as many as it says.
    """

    setups: Mapping[str, Setup]
    runs: int
    quiet: int
    disabled: int
    embedded: int = 0
    is_measured: bool = False


def setup_for(fault: Fault, setup: Setup) -> Setup | None:
    """The setup with what the fault needs; None where it does not apply even so."""
    wanted = replace(setup, **fault.needs)
    return wanted if _is_possible(wanted) and fault.applies(wanted) else None


def quiet_setup_for(fault: Fault, setup: Setup) -> Setup | None:
    """The same for its quiet twin; None where that is not possible or the fault does not apply."""
    wanted = setup_for(fault, setup)
    quiet = None if wanted is None else replace(wanted, **fault.quiet_needs)
    return quiet if quiet is not None and _is_possible(quiet) else None


def _is_possible(setup: Setup) -> bool:
    return setup.topk == 1 or not setup.adaptive  # only a chain's length may change as it runs


def _tree(page_size: int, topk: int, num_steps: int, **more: object) -> Setup:
    return replace(Setup(page_size=page_size, topk=topk, num_steps=num_steps), **more)


QUICK = {
    "p4-k2-t3": _tree(4, 2, 3),
    "p1-k4-t2-overlap": _tree(1, 4, 2, schedule="overlap"),
    "p16-k1-t3-batch4": _tree(16, 1, 3, batch=4),
}
FULL = QUICK | {
    "p64-k8-t2": _tree(64, 8, 2, num_draft_tokens=8),
    "p4-k4-t5-paged": _tree(4, 4, 5, num_draft_tokens=12, backend="paged"),
    "p16-k2-t4-overlap": _tree(16, 2, 4, schedule="overlap", batch=3),
    "p1-k1-t1": _tree(1, 1, 1),
    "p4-k1-t5-adaptive": _tree(4, 1, 5, adaptive=True),
    "p4-k2-t3-shared": _tree(4, 2, 3, shared=12, batch=6),
    "p4-k2-t3-uncached": _tree(4, 2, 3, prefix_cache=False, batch=1),
    "p4-k2-t3-chunked": _tree(4, 2, 3, chunk=16, prompt_len=48),
    "p4-plain-batch16": Setup(drafts=False, batch=16),
    "p16-k2-t2-pressed": _tree(16, 2, 2, pages=30, batch=6, new_token_ratio=0.1),
    "p4-k2-t3-rolling": _tree(4, 2, 3, content="rolling"),
    "p1-k2-t2-batch64": _tree(1, 2, 2, batch=64, new_tokens=8),
    EMBEDDED: _tree(16, 4, 5, model=EMBEDDED, prompt_len=64, num_draft_tokens=8),
}
PLANS = {
    "quick": Plan(QUICK, runs=1, quiet=1, disabled=1),
    "full": Plan(FULL, runs=200, quiet=20, disabled=20, embedded=10, is_measured=True),
}
