"""What the Prometheus of an engine's process says of the canary; nothing where the engine has not loaded one.

An engine of several processes names a folder for their metrics before any of them loads Prometheus; what is made here
lands there like the engine's own, and on the same page.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from kvcanary.hardware.identity import LABELS, hardware_of, labels_of
from kvcanary.pools.launch_site import site_name
from kvcanary.report.finding import UNKNOWN, Finding

WATCHED = "pools that a canary watches now: 1; 0 once it has stopped"
COUNTED_STEPS = 64  # that a counter is behind at most
#: By name what each counts, and its labels beside those of machine and device.
COUNTERS = {
    "findings": ("findings of the canary in this engine, each once", ("code", "site")),
    "incidents": ("faults by the family of their likeliest cause", ("family",)),
    "bit_errors": ("incidents of one changed word that nobody wrote", ()),
    "forwards": ("forwards that the canary watched", ()),
}


def found(finding: Finding, rank: int) -> None:
    """One more finding, which is an incident: `kvcanary_findings_total`, `_incidents_total`, `_bit_errors_total`."""
    host = sys.modules.get("prometheus_client")
    if host is None:
        return
    target = _target(finding.hardware, rank)
    family = finding.causes[0].family if finding.causes else UNKNOWN
    _counter(host, "findings").labels(code=finding.code, site=site_name(*finding.site), **target).inc()
    _counter(host, "incidents").labels(family=family, **target).inc()
    if finding.is_bit_error:
        _counter(host, "bit_errors").labels(**target).inc()


def ran(device: torch.device, rank: int) -> None:
    """`COUNTED_STEPS` more forwards were watched: `kvcanary_forwards_total`."""
    host = sys.modules.get("prometheus_client")
    if host is not None:
        _counter(host, "forwards").labels(**_labels_here(device, rank)).inc(COUNTED_STEPS)


def watching(engine: str, pool: str, rank: int, is_watched: bool) -> None:
    """`kvcanary_watching{engine, pool, rank}`."""
    host = sys.modules.get("prometheus_client")
    if host is not None:
        for name in COUNTERS:  # a page that says so lists findings as well, none or some
            _counter(host, name)
        _gauge(host).labels(engine=engine, pool=pool, rank=str(rank)).set(int(is_watched))


@cache
def _counter(host: Any, name: str) -> Any:
    about, own = COUNTERS[name]
    held = _held(host, f"kvcanary_{name}_total")
    return held or host.Counter(f"kvcanary_{name}", about, [*own, "rank", *LABELS.values()])


@cache
def _labels_here(device: torch.device, rank: int) -> dict[str, str]:
    return _target(hardware_of(device), rank)


def _target(hardware: dict[str, Any], rank: int) -> dict[str, str]:
    """Every target label; one that is not known is empty, which Prometheus takes for absent."""
    return dict.fromkeys(LABELS.values(), "") | labels_of(hardware) | {"rank": str(rank)}


@cache
def _gauge(host: Any) -> Any:
    labels = ["engine", "pool", "rank"]
    held = _held(host, "kvcanary_watching")
    return held or host.Gauge("kvcanary_watching", WATCHED, labels, multiprocess_mode="mostrecent")


def _held(host: Any, name: str) -> Any:
    """What was registered under a name, by another copy of this module."""
    return getattr(host.REGISTRY, "_names_to_collectors", {}).get(name)
