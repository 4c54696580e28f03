"""Compatibility: which releases of a host are accepted, and whether the names that an adapter uses are still there."""

from __future__ import annotations

import dis
import inspect
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import structlog

from kvcanary.errors import CanaryConfigError

#: The variable that refuses every release that is not among the tested ones; any other value than `strict` is refused.
ACCEPT = "KVCANARY_ACCEPT"
DOCS = "docs/adapters.md#compatibility"
_events = structlog.get_logger("kvcanary")
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Needed:
    """A function or class of the host, the parameters that it must begin with, and those that must be among them.

    name:       `package.module:Class.method`
    attributes: what objects of this class must have: fields, properties, or what a method assigns to `self`
    optional:   the same, of some releases only: the adapter does without
    """

    name: str
    parameters: tuple[str, ...] = ()
    among: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def accept(host: str, version: str, tested: Sequence[str]) -> str | None:
    """None where this release of a host may be attached to, else the sentence that refuses it.

    tested: releases as `major.minor`, or with a patch where a host has no other numbers, oldest first
    A release outside of their range is accepted and told once a process (`kvcanary.untested_release`): names and
    signatures decide. With KVCANARY_ACCEPT=strict only tested releases are accepted.
    """
    policy = os.environ.get(ACCEPT, "").strip().lower()
    if policy not in ("", "strict"):
        raise CanaryConfigError(f"{ACCEPT} must be 'strict' or unset, got {policy!r}")
    found = standing(version, tested)
    if found == "tested":
        return None
    if policy == "strict":
        return f"{host} {version} is not known here: install {' or '.join(tested)}"
    if found != "between tested" and (host, version) not in _warned:
        _warned.add((host, version))
        _events.warning("kvcanary.untested_release", host=host, version=version, tested=list(tested), docs=DOCS)
    return None


def standing(version: str, tested: Sequence[str]) -> str:
    """Where a release stands: `tested`, `older than tested`, `newer than tested`, or between those that were."""
    known = [_numbers(own) for own in tested]
    release = _numbers(version, len(known[0]))
    if release in known:
        return "tested"
    if not release:
        return "of no number that is known"
    if release < known[0]:
        return "older than tested"
    return "newer than tested" if release > known[-1] else "between tested"


def missing(needs: Iterable[Needed]) -> list[str]:
    """What is gone or has other parameters than these, one sentence each."""
    return list(dict.fromkeys(sentence for need in needs if (sentence := _fault(need))))


def resolved(name: str) -> Any:
    """What `package.module:Class.method` names; ImportError or AttributeError where it is gone."""
    module, _, path = name.partition(":")
    found = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _numbers(version: str, count: int | None = None) -> tuple[int, ...]:
    """The numbers that a version begins with, the first `count`; () where there are fewer."""
    found = re.match(r"\d+(\.\d+)+", version)
    numbers = tuple(int(number) for number in found[0].split(".")) if found else ()
    return numbers[:count] if len(numbers) >= (count or 0) else ()


def _fault(need: Needed) -> str:
    try:
        found = resolved(need.name)
    except AttributeError:
        return f"{need.name} is gone"
    except ImportError as error:
        module = need.name.partition(":")[0]
        is_gone = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        return f"{need.name} is gone" if is_gone else f"{module} cannot be imported: {error}"
    parameters = tuple(inspect.signature(found).parameters) if need.parameters or need.among else ()  # type: ignore[arg-type]
    attributes = attributes_of(found) if need.attributes else frozenset()  # type: ignore[arg-type]
    return fault_of(need, parameters, attributes)


def fault_of(need: Needed, parameters: Sequence[str], attributes: Collection[str]) -> str:
    """What speaks against a name that is there, from its parameters and the attributes of its objects."""
    begins = tuple(parameters[: len(need.parameters)])
    if begins != need.parameters:
        return f"{need.name} must begin with ({', '.join(need.parameters)}), got ({', '.join(begins)})"
    absent = [name for name in need.among if name not in parameters]
    if absent:
        return f"{need.name} must take {', '.join(absent)}, got ({', '.join(parameters)})"
    absent = [name for name in need.attributes if name not in attributes]
    return f"{need.name} must have {', '.join(absent)}" if absent else ""


def attributes_of(cls: type) -> frozenset[str]:
    """Names that objects of a class have: fields, methods, properties, and what any of its methods assigns."""
    names = set(dir(cls))
    for base in cls.__mro__:  # an enumeration hides its methods from dir()
        names.update(vars(base), vars(base).get("__annotations__", ()))
        for function in _functions([value for value in vars(base).values() if callable(value)]):
            names.update(_stored(function.__code__))
    return frozenset(names)


@cache
def _stored(code: CodeType) -> frozenset[str]:
    """Attributes that this assigns. Asked for in every attach, of the same methods of large classes."""
    return frozenset(own.argval for own in dis.get_instructions(code) if own.opname == "STORE_ATTR")


def _functions(values: Iterable[object]) -> Iterator[FunctionType]:
    """Functions among these, and those that they wrap, which others may have done in any way."""
    for value in values:
        if isinstance(value, FunctionType):
            yield value
            inner = [cell.cell_contents for cell in value.__closure__ or ()]
            yield from _functions(own for own in inner if own is not value)
