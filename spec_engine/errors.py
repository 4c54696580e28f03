"""The error that every refused setting becomes."""

from __future__ import annotations

from kvcanary import KVCanaryError


class ConfigError(KVCanaryError, ValueError):
    """A setting that the engine cannot honour; ``hint`` is the remedy, one line."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
