"""Engines that are installed: would the canary watch them, and which of its checks would have nothing to judge."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType

#: By host, the module of its adapter with TESTED, FED, and what speaks against attaching (check, closed_paths).
ADAPTERS = {
    "transformers": "kvcanary.adapters.transformers",
    "vllm": "kvcanary.adapters.vllm.compatibility",
    "sglang": "kvcanary.adapters.sglang.compatibility",
}
NO_DATA = "the adapter has no data for them"


@dataclass(frozen=True)
class Verdict:
    """On one host.

    standing:    `supported`, or how its release stands to those that were tested, or `refused`
    refused:     why nothing would be attached, a sentence each; empty where something would be
    inactive:    by reason, the codes that cannot be reported
    not_watched: by path of the host, the names that are gone
    """

    version: str | None
    standing: str
    refused: list[str] = field(default_factory=list)
    tested: list[str] = field(default_factory=list)
    inactive: dict[str, list[str]] = field(default_factory=dict)
    not_watched: dict[str, str] = field(default_factory=dict)


def verdict(host: str) -> Verdict | None:
    """None where this host is not installed; whatever its import raises is a refusal."""
    if importlib.util.find_spec(host) is None:
        return None
    version = None
    try:
        version = str(import_module(host).__version__)
        adapter = import_module(ADAPTERS[host])
        if faults := adapter.check():
            return Verdict(version, "refused", faults, list(adapter.TESTED))
        return _watched(version, adapter)
    except Exception as error:
        return Verdict(version, "refused", [f"{type(error).__name__}: {error}"])


def _watched(version: str, adapter: ModuleType) -> Verdict:
    from kvcanary.adapters.compatibility import standing

    found = standing(version, adapter.TESTED)
    return Verdict(
        version,
        "supported" if found in ("tested", "between tested") else found,
        tested=list(adapter.TESTED),
        inactive=_inactive(adapter.FED),
        not_watched=adapter.closed_paths(),
    )


def _inactive(fed: frozenset[str]) -> dict[str, list[str]]:
    from kvcanary import CanaryConfig
    from kvcanary.report.certificate import inactive_classes

    by_reason: dict[str, list[str]] = {}
    for code, reason in sorted(inactive_classes(CanaryConfig.from_env(), fed).items()):
        by_reason.setdefault(NO_DATA if reason == "not fed" else reason, []).append(code)
    return by_reason
