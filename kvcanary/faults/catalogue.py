"""All faults by name: those of the families named here, then those that other distributions bring.

Only who arms or lists one loads this. A third party's entry point of the group `kvcanary.faults` names a sequence of
`Fault`.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points

from kvcanary.errors import KVCanaryError
from kvcanary.faults.fault import Fault
from kvcanary.faults.memory import bits, identity, lifetime, scales, split, states, transfer, uninitialised, windows
from kvcanary.faults.steps import adaptive, addressing, bounds, draft, graphs, hooks, lengths, order, ranks

GROUP = "kvcanary.faults"
#: Each is a module with a tuple FAULTS, and the first half of their names is its own.
FAMILIES: dict[str, tuple[Fault, ...]] = {
    module.__name__.rpartition(".")[2]: module.FAULTS
    for module in (
        *(adaptive, addressing, bits, bounds, draft, graphs, hooks, identity, lengths, lifetime, order, ranks, scales),
        *(split, states, transfer, uninitialised, windows),
    )
}


class UnknownFaultError(KVCanaryError, ValueError):
    """The catalogue has no fault of that name; ``hint`` is the remedy, one line."""

    hint = "kvcanary faults lists them all"


@cache
def faults() -> list[Fault]:
    """Every fault, family by family; ValueError where two have one name."""
    found = [fault for entries in FAMILIES.values() for fault in entries]
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


def _closest(name: str, known: dict[str, Fault]) -> str:
    close = get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"its families are {', '.join(FAMILIES)}"
