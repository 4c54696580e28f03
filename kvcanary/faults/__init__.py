"""Published bugs that can be brought back: an engine calls `seam` where it has a fix, `arm` undoes the fix.

The fix is proved by undoing it: armed, a fault must end in the error or finding that its entry names. With nothing
armed a seam is one test of an empty dict, and no module of the catalogue is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from kvcanary.faults.fault import Armed

ENVIRONMENT = "KVCANARY_REENACT"

Value = TypeVar("Value")

_armed: dict[str, Armed] = {}


def seam(name: str, value: Value, **where: Any) -> Value:
    """``value`` of a formula that has a fix; what it was before the fix while the fault ``name`` is armed.

    where: what the wrong formula needs, and the place.
    """
    if not _armed or name not in _armed:
        return value
    return _armed[name].strike(value, where)


@contextmanager
def arm(name: str) -> Iterator[Armed]:
    """Undo one fix meanwhile; UnknownFaultError when the catalogue has no such fault."""
    armed, before = _new(name), _armed.get(name)
    _armed[name] = armed
    try:
        yield armed
    finally:
        if before is None:
            del _armed[name]
        else:
            _armed[name] = before


@contextmanager
def disarmed() -> Iterator[None]:
    """Every fix in force meanwhile, but for those of readers: a probe of attention is no step of an engine."""
    before = dict(_armed)
    for name in before:
        if not name.startswith("reader."):
            del _armed[name]
    try:
        yield
    finally:
        _armed.update(before)


def arm_from_environment() -> None:
    """Undo what KVCANARY_REENACT names, for the rest of the process; an engine calls this when it starts."""
    name = os.environ.get(ENVIRONMENT)
    if name and name not in _armed:
        _armed[name] = _new(name)


def _new(name: str) -> Armed:
    from kvcanary.faults.catalogue import find
    from kvcanary.faults.fault import Armed

    return Armed(find(name))
