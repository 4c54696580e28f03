"""What an engine that is only watched cannot be asked for."""

from __future__ import annotations

from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError


def expect_watching(config: CanaryConfig, one: str) -> None:
    """AdapterError where the mode asks for what nobody can do from outside an engine: to end `one` thing of many."""
    if config.mode not in ("log", "raise"):
        raise AdapterError(f"mode must be 'log' or 'raise' here, got {config.mode!r}: nobody can end {one}")
