"""The thresholds of tree sampling, apart from it: settings are read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from spec_engine.errors import ConfigError


@dataclass(frozen=True)
class Thresholds:
    """What tree sampling gives up of exactness for longer acceptance; both 1 is exact.

    single: a draft of at least this probability is accepted whatever the coin shows; acc: the siblings' probability so
    far is divided by it.
    """

    single: float = 1.0
    acc: float = 1.0

    def __post_init__(self) -> None:
        for name in ("single", "acc"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"threshold_{name} must lie in [0, 1], got {getattr(self, name)}")
