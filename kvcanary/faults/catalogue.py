"""All faults by name: those of the modules of this package, then those that other distributions bring.

Only who arms or lists one loads this. A third party's entry point of the group `kvcanary.faults` names a sequence of
`Fault`.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules

import kvcanary.faults
from kvcanary.errors import KVCanaryError
from kvcanary.faults.fault import Fault

GROUP = "kvcanary.faults"


class UnknownFaultError(KVCanaryError, ValueError):
    """The catalogue has no fault of that name; ``hint`` is the remedy, one line."""

    hint = "kvcanary faults lists them all"


@cache
def families() -> tuple[str, ...]:
    """The modules of this package that have a tuple FAULTS."""
    return tuple(family for family, _ in _own())


@cache
def faults() -> list[Fault]:
    """Every fault, family by family; ValueError where two have one name."""
    found = [fault for _, entries in _own() for fault in entries]
    found += [fault for point in entry_points(group=GROUP) for fault in point.load()]
    names = [fault.name for fault in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"fault names must be unique, got {', '.join(twice)} twice")
    return found


def find(name: str) -> Fault:
    """The fault of that name; UnknownFaultError with the closest ones, or the families, when there is none."""
    known = {fault.name: fault for fault in faults()}
    if name not in known:
        raise UnknownFaultError(f"fault must be one of the catalogue, got {name!r}: {_closest(name, known)}")
    return known[name]


def _own() -> Iterator[tuple[str, tuple[Fault, ...]]]:
    for module in sorted(module.name for module in iter_modules(kvcanary.faults.__path__)):
        entries = getattr(import_module(f"{kvcanary.faults.__name__}.{module}"), "FAULTS", None)
        if entries is not None:
            yield module, entries


def _closest(name: str, known: dict[str, Fault]) -> str:
    close = get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"its families are {', '.join(families())}"
