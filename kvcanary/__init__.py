"""kvcanary: every KV cache read and write of an LLM engine, checked exactly.

Names are imported on first use, so that `import kvcanary` stays cheap and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "Announced": "manager.substep",
    "CanaryConfig": "config",
    "CanaryConfigError": "errors",
    "CanaryManager": "manager.manager",
    "Finding": "report.finding",
    "HookClock": "manager.hook_clock",
    "HookOrderError": "errors",
    "KVCanaryError": "errors",
    "KVCorruptionError": "errors",
    "LifetimeError": "errors",
    "NOWHERE": "pools.slot_maps",
    "NO_STATE": "pools.state_views",
    "PlanError": "errors",
    "PoolView": "pools.views",
    "ProbeForward": "probe.forwards",
    "ReadPlan": "pools.plans",
    "ForeignSnapshotError": "errors",
    "Report": "report.render",
    "Seal": "transfers.seal",
    "SealError": "errors",
    "StateView": "pools.state_views",
    "Tier": "tier.tier",
    "States": "states.states",
    "SubstepCanary": "manager.substep",
    "WarmupSubstep": "manager.substep",
    "WritePlan": "pools.plans",
    "first_visible": "pools.slot_maps",
    "hardware_of": "hardware.identity",
    "has_turn": "hardware.turns",
    "labels_of": "hardware.identity",
    "probe_pages": "probe.forwards",
    "site_name": "pools.launch_site",
    "turn_of": "hardware.turns",
}

__all__ = [
    "NOWHERE",
    "NO_STATE",
    "Announced",
    "CanaryConfig",
    "CanaryConfigError",
    "CanaryManager",
    "Finding",
    "ForeignSnapshotError",
    "HookClock",
    "HookOrderError",
    "KVCanaryError",
    "KVCorruptionError",
    "LifetimeError",
    "PlanError",
    "PoolView",
    "ProbeForward",
    "ReadPlan",
    "Report",
    "Seal",
    "SealError",
    "StateView",
    "States",
    "SubstepCanary",
    "Tier",
    "WarmupSubstep",
    "WritePlan",
    "__version__",
    "first_visible",
    "hardware_of",
    "has_turn",
    "labels_of",
    "probe_pages",
    "site_name",
    "turn_of",
]

if TYPE_CHECKING:
    from kvcanary.config import CanaryConfig
    from kvcanary.errors import (
        CanaryConfigError,
        ForeignSnapshotError,
        HookOrderError,
        KVCanaryError,
        KVCorruptionError,
        LifetimeError,
        PlanError,
        SealError,
    )
    from kvcanary.hardware.identity import hardware_of, labels_of
    from kvcanary.hardware.turns import has_turn, turn_of
    from kvcanary.manager.hook_clock import HookClock
    from kvcanary.manager.manager import CanaryManager
    from kvcanary.manager.substep import Announced, SubstepCanary, WarmupSubstep
    from kvcanary.pools.launch_site import site_name
    from kvcanary.pools.plans import (
        ReadPlan,
        WritePlan,
    )
    from kvcanary.pools.slot_maps import NOWHERE, first_visible
    from kvcanary.pools.state_views import NO_STATE, StateView
    from kvcanary.pools.views import PoolView
    from kvcanary.probe.forwards import ProbeForward, probe_pages
    from kvcanary.report.finding import Finding
    from kvcanary.report.render import Report
    from kvcanary.states.states import States
    from kvcanary.tier.tier import Tier
    from kvcanary.transfers.seal import Seal


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvcanary' has no attribute {name!r}")
    value = getattr(import_module(f"kvcanary.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
