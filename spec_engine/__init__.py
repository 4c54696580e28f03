"""A paged tree-drafting (EAGLE) serving engine whose every KV read and write can be checked.

>>> from spec_engine import Engine, EngineConfig, SamplingParams
>>> engine = Engine(EngineConfig(model="embedded"))
>>> [output] = engine.generate(["def add(a, b):"], SamplingParams(max_new_tokens=16))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_engine.config import ConfigError, EngineConfig
    from spec_engine.engine import Engine
    from spec_engine.request import Output, TokenEvent
    from spec_engine.sampling import SamplingParams

__all__ = ["ConfigError", "Engine", "EngineConfig", "Output", "SamplingParams", "TokenEvent"]

_HOMES = {
    "ConfigError": "config",
    "Engine": "engine",
    "EngineConfig": "config",
    "Output": "request",
    "SamplingParams": "sampling",
    "TokenEvent": "request",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
