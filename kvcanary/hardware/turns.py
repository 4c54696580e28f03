"""Turns: of a large fleet a share is watched at a time, another one each week, so that every GPU has its turn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

WEEK = timedelta(days=7)
_MOST = 1 << 64
_events = structlog.get_logger("kvcanary")


def turn_of(share: float, now: datetime | None = None) -> dict[str, Any]:
    """share, and the week (ISO 8601, UTC) in which that is asked."""
    year, week, _ = (now or datetime.now(UTC)).isocalendar()
    return {"share": share, "week": f"{year}-W{week:02d}"}


def has_turn(share: float, hardware: Mapping[str, Any], rank: int = 0, now: datetime | None = None) -> bool:
    """Whether this worker is watched this week; says so, as `kvcanary.turn`, where not all are.

    Weeks walk through the places of all GPUs on a circle: each place is a hash of the GPU's UUID, or of host and rank,
    and a week takes the next `share` of the circle. So whoever stays has a turn every 1 / share weeks, rounded up.
    """
    if share >= 1:
        return True
    is_watched = _distance(_name(hardware, rank), share, now) < share
    _events.info(
        "kvcanary.turn",
        watched=is_watched,
        rank=rank,
        hardware=dict(hardware),
        share=share,
        week=turn_of(share, now)["week"],
    )
    return is_watched


def _name(hardware: Mapping[str, Any], rank: int) -> str:
    return str(hardware.get("gpu_uuid") or f"{hardware['hostname']}/{rank}")


def _distance(name: str, share: float, now: datetime | None) -> float:
    """How far behind the beginning of this week's arc a worker stands, in [0, 1)."""
    place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") / _MOST
    weeks = ((now or datetime.now(UTC)) - datetime(1970, 1, 5, tzinfo=UTC)) // WEEK
    return (place - weeks * share) % 1.0
