"""KVCANARY_SHARE: a worker that has no turn this week gets no canary, and says so when it is asked."""

from __future__ import annotations

from typing import Any

import torch

from kvcanary.config import CanaryConfig
from kvcanary.hardware.identity import hardware_of
from kvcanary.hardware.turns import has_turn, turn_of


def report_without_turn(config: CanaryConfig, device: torch.device | None, rank: int) -> dict[str, Any] | None:
    """What a worker reports that is not watched this week; None where it has its turn."""
    if config.share == 1:
        return None
    hardware = hardware_of(device)
    if has_turn(config.share, hardware, rank):
        return None
    return {"armed": False, "rank": rank, "mode": "off", "turn": turn_of(config.share), "hardware": hardware}
