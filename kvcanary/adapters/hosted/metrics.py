"""What the Prometheus of an engine's process says of the canary; nothing where the engine has not loaded one.

An engine of several processes names a folder for their metrics before any of them loads Prometheus; what is made here
lands there like the engine's own, and on the same page.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

WATCHED = "pools that a canary watches now: 1; 0 once it has stopped"
FOUND = "findings of the canary in this engine, each once"


def found(code: str) -> None:
    """One more finding: `kvcanary_findings_total{code}`."""
    host = sys.modules.get("prometheus_client")
    if host is not None:
        _counter(host).labels(code=code).inc()


def watching(engine: str, pool: str, rank: int, is_watched: bool) -> None:
    """`kvcanary_watching{engine, pool, rank}`."""
    host = sys.modules.get("prometheus_client")
    if host is not None:
        _counter(host)  # a page that says so lists findings as well, none or some
        _gauge(host).labels(engine=engine, pool=pool, rank=str(rank)).set(int(is_watched))


@cache
def _counter(host: Any) -> Any:
    return _held(host, "kvcanary_findings_total") or host.Counter("kvcanary_findings", FOUND, ["code"])


@cache
def _gauge(host: Any) -> Any:
    labels = ["engine", "pool", "rank"]
    held = _held(host, "kvcanary_watching")
    return held or host.Gauge("kvcanary_watching", WATCHED, labels, multiprocess_mode="mostrecent")


def _held(host: Any, name: str) -> Any:
    """What was registered under a name, by another copy of this module."""
    return getattr(host.REGISTRY, "_names_to_collectors", {}).get(name)
