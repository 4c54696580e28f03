"""Certificate: what was checked, what was not and why, so that a clean run can say so."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict
from typing import Any

import torch

import kvcanary
from kvcanary.calls.coverage import Coverage
from kvcanary.codes import CODES, CONTENT_CODES, FED
from kvcanary.config import CanaryConfig
from kvcanary.hardware.identity import hardware_of
from kvcanary.hardware.turns import turn_of
from kvcanary.report.finding import FindingLog


def active_classes(config: CanaryConfig, fed: Set[str] = FED) -> list[str]:
    """Codes that this configuration can report; `fed`: those that something feeds."""
    inactive = inactive_classes(config, fed)
    return [code for code in CODES if code not in inactive]


def inactive_classes(config: CanaryConfig, fed: Set[str] = FED) -> dict[str, str]:
    """The other codes, each with the reason why it can not be reported."""
    reasons: dict[str, str] = {}
    for code in CODES:
        if code in config.disable:
            reasons[code] = "disabled"
        elif code == "H2":
            reasons[code] = "an error at once, in every mode"
        elif code == "L1" and code in fed and config.mode == "raise":
            reasons[code] = "an error at once, in mode raise"
        elif code not in fed:
            reasons[code] = "not fed"
        elif code in CONTENT_CODES and config.content == "write":
            reasons[code] = "content is not compared"
    return reasons


def certificate(
    config: CanaryConfig,
    coverage: Coverage,
    live_bytes: int,
    seed_id: str,
    log: FindingLog,
    fed: Set[str] = FED,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """The keys are stable; values are plain JSON. `device`: of the pools, None where it is not known."""
    counted = asdict(coverage)
    del counted["unproved_stores"]  # told as `store`
    return {
        "mode": config.mode,
        "content": config.content,
        **counted,
        "live_bytes": live_bytes,
        "classes": active_classes(config, fed),
        "inactive_classes": inactive_classes(config, fed),
        "disabled": sorted(config.disable),
        "announced": coverage.announced or "forwards not announced by the engine",
        "reader_probes": coverage.reader_probes
        or ": ".join(filter(None, ("attention not probed", coverage.not_probed))),
        "store": "proved" if coverage.is_store_proved else "not proved",
        "seed_id": seed_id,
        "version": kvcanary.__version__,
        "turn": turn_of(config.share),
        "hardware": hardware_of(device),
        "families": dict(log.incidents),
        "bit_errors": log.bit_errors,
        "findings": [group.to_dict() for group in log.groups.values()],
    }
