"""Certificate: what was checked, what was not and why, so that a clean run can say so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcanary.codes import CODES, CONTENT_CODES
from kvcanary.config import CanaryConfig


@dataclass
class Coverage:
    """Counters of one manager.

    slots_checked: entries that some forward read and whose identity was judged
    bytes_checked: bytes of K and V that were read again and compared
    max_unread_steps: longest time, in steps, that a committed byte went without a look
    freed_unread_bytes: committed bytes whose pages were freed without a last look
    """

    forwards: int = 0
    slots_checked: int = 0
    slots_sealed: int = 0
    bytes_checked: int = 0
    peak_live_bytes: int = 0
    max_unread_steps: int = 0
    freed_unread_bytes: int = 0
    unchecked: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str, count: int) -> None:
        """Something was not judged; the certificate says how often, and why."""
        if count:
            self.unchecked[reason] = self.unchecked.get(reason, 0) + count

    def counters(self) -> dict[str, int]:
        """The few that close a report."""
        return {
            "forwards": self.forwards,
            "slots checked": self.slots_checked,
            "bytes re-read": self.bytes_checked,
            "not judged": sum(self.unchecked.values()),
        }


def active_classes(config: CanaryConfig) -> list[str]:
    """Codes that this configuration can report."""
    content_off = CONTENT_CODES if config.content == "write" else frozenset()
    return [code for code in CODES if code not in config.disable | content_off]


def certificate(
    config: CanaryConfig, coverage: Coverage, live_bytes: int, seed_id: str, findings: list[dict[str, Any]]
) -> dict[str, Any]:
    """The keys are stable; values are plain JSON."""
    classes = active_classes(config)
    return {
        "mode": config.mode,
        "content": config.content,
        "forwards": coverage.forwards,
        "slots_checked": coverage.slots_checked,
        "slots_sealed": coverage.slots_sealed,
        "bytes_checked": coverage.bytes_checked,
        "live_bytes": live_bytes,
        "peak_live_bytes": coverage.peak_live_bytes,
        "max_unread_steps": coverage.max_unread_steps,
        "freed_unread_bytes": coverage.freed_unread_bytes,
        "classes": classes,
        "inactive_classes": [code for code in CODES if code not in classes],
        "disabled": sorted(config.disable),
        "unchecked": dict(coverage.unchecked),
        "store": "not proved",  # slots are not poisoned before the body runs
        "seed_id": seed_id,
        "findings": findings,
    }
