"""kvcanary: every KV cache read and write of an LLM engine, checked exactly.

Names are imported on first use, so that `import kvcanary` stays cheap and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "CanaryConfig": "config",
    "CanaryConfigError": "errors",
    "CanaryManager": "manager.manager",
    "Finding": "report.finding",
    "HookOrderError": "errors",
    "KVCanaryError": "errors",
    "KVCorruptionError": "errors",
    "LifetimeError": "errors",
    "PlanError": "errors",
    "PoolView": "pools.views",
    "ReadPlan": "pools.plans",
    "Report": "report.render",
    "SubstepCanary": "manager.substep",
    "WritePlan": "pools.plans",
}

__all__ = [
    "CanaryConfig",
    "CanaryConfigError",
    "CanaryManager",
    "Finding",
    "HookOrderError",
    "KVCanaryError",
    "KVCorruptionError",
    "LifetimeError",
    "PlanError",
    "PoolView",
    "ReadPlan",
    "Report",
    "SubstepCanary",
    "WritePlan",
    "__version__",
]

if TYPE_CHECKING:
    from kvcanary.config import CanaryConfig
    from kvcanary.errors import (
        CanaryConfigError,
        HookOrderError,
        KVCanaryError,
        KVCorruptionError,
        LifetimeError,
        PlanError,
    )
    from kvcanary.manager.manager import CanaryManager
    from kvcanary.manager.substep import SubstepCanary
    from kvcanary.pools.plans import (
        ReadPlan,
        WritePlan,
    )
    from kvcanary.pools.views import PoolView
    from kvcanary.report.finding import Finding
    from kvcanary.report.render import Report


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvcanary' has no attribute {name!r}")
    value = getattr(import_module(f"kvcanary.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
