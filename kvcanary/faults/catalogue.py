"""All faults by name. Only who arms or lists one loads this."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from kvcanary.errors import KVCanaryError
from kvcanary.faults.fault import Fault

FAMILIES = ("bounds", "draft", "lengths")  # modules of this package, each with a tuple FAULTS


class UnknownFaultError(KVCanaryError, ValueError):
    """The catalogue has no fault of that name; ``hint`` is the remedy, one line."""

    hint = "kvcanary faults lists them all"


def faults() -> list[Fault]:
    """Every fault, family by family."""
    return [fault for family in FAMILIES for fault in import_module(f"kvcanary.faults.{family}").FAULTS]


def find(name: str) -> Fault:
    """The fault of that name; UnknownFaultError with the closest ones when there is none."""
    known = {fault.name: fault for fault in faults()}
    if name not in known:
        raise UnknownFaultError(
            f"fault must be one of the catalogue, got {name!r}: did you mean {_closest(name, known)}?"
        )
    return known[name]


def _closest(name: str, known: dict[str, Fault]) -> str:
    return " or ".join(get_close_matches(name, known, n=3, cutoff=0.4) or known)
