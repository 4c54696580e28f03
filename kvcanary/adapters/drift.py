"""Drift: whether the names and signatures that an adapter leans on are still there."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Needed:
    """A function or class of the host, and the parameters that it must begin with.

    name: `package.module:Class.method`
    """

    name: str
    parameters: tuple[str, ...] = ()


def missing(needs: Iterable[Needed]) -> list[str]:
    """What is gone or has other parameters than these, one sentence each."""
    return [sentence for need in needs if (sentence := _fault(need))]


def _fault(need: Needed) -> str:
    module, _, path = need.name.partition(":")
    try:
        found = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return f"{need.name} is gone"
    if need.parameters:
        parameters = tuple(inspect.signature(found).parameters)[: len(need.parameters)]  # type: ignore[arg-type]
        if parameters != need.parameters:
            return f"{need.name} must begin with ({', '.join(need.parameters)}), got ({', '.join(parameters)})"
    return ""
