"""Compatibility: whether the names and signatures that an adapter leans on are still there."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Needed:
    """A function or class of the host, the parameters that it must begin with, and those that must be among them.

    name: `package.module:Class.method`
    """

    name: str
    parameters: tuple[str, ...] = ()
    among: tuple[str, ...] = ()


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
    if not need.parameters and not need.among:
        return ""
    parameters = tuple(inspect.signature(found).parameters)  # type: ignore[arg-type]
    begins = parameters[: len(need.parameters)]
    if begins != need.parameters:
        return f"{need.name} must begin with ({', '.join(need.parameters)}), got ({', '.join(begins)})"
    absent = [name for name in need.among if name not in parameters]
    return f"{need.name} must take {', '.join(absent)}, got ({', '.join(parameters)})" if absent else ""
