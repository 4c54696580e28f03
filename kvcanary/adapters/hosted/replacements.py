"""Methods of an engine's instances, replaced as long as its canary is attached."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from kvcanary.adapters.hosted.guard import Guard


class Replacements:
    """What was replaced, and how to undo it. `guard` stands around all of it, but for what has one of its own."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, wrapper: Callable[..., Any], guard: Guard | None = None) -> None:
        """Let `owner.name(...)` call `wrapper(method, ...)`, on this instance alone; `method` is the one replaced."""
        method = getattr(owner, name)
        own, around = owner.__dict__.get(name), (guard or self._guard).around(wrapper, method)
        around.kvcanary_replaces = method  # type: ignore[attr-defined]
        setattr(owner, name, around)
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def replace_function(self, module: str, name: str, wrapper: Callable[..., Any]) -> None:
        """The same for a function, in every module that has it under its name."""
        function = getattr(sys.modules[module], name)
        around = self._guard.around(wrapper, function)
        for holder in list(sys.modules.values()):
            if (getattr(holder, "__dict__", None) or {}).get(name) is function:
                setattr(holder, name, around)
                self._undo.append(functools.partial(setattr, holder, name, function))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give an instance something that it did not have."""
        setattr(owner, name, value)
        self._undo.append(functools.partial(delattr, owner, name))

    def undo(self) -> None:
        """All of it, the latest first. Twice is harmless."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []


def replaced_by(owner: Any, name: str) -> Any:
    """The method that a replacement stands for; None where there is no replacement."""
    return getattr(getattr(owner, name), "kvcanary_replaces", None)
