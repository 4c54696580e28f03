"""The decorator of compiled loops, and how they see memory that is given by its address.

An address costs nothing to pass; an array costs as much as a short loop over it. A struct (layout.py) is seen by its
fields: `view(REQUEST, address).num_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import structlog
from numba import carray, from_dtype, njit, types
from numba.extending import intrinsic

SECONDS_TO_COMPILE = 25  # all loops, on one core of a server

_events = structlog.get_logger("kvcanary")
_OWN = Path(__file__).read_bytes()
#: By name, those with a signature, which Python may call (native/loops.py).
LOOPS: dict[str, Any] = {}


def loop(signature: str | None = None) -> Callable[[Any], Any]:
    """Compile at import, or take from the disk what an earlier process has compiled; without a signature: inline."""

    def compiled(function: Any) -> Any:
        function.__qualname__ += f"-{_digest(function)}"  # the name of its file on the disk
        made = njit(signature, nogil=True, cache=True, error_model="numpy")(function)
        if signature is not None:
            LOOPS[function.__name__] = made
            if made.stats.cache_misses:
                _log_the_wait()
        return made

    return compiled


def entry(made: Any) -> Callable[..., Any]:
    """A compiled loop as Python calls it: where all that it takes are numbers, whose types nobody has to find out."""
    (signature,) = made.signatures
    if not all(isinstance(kind, types.Integer | types.Boolean) for kind in signature):
        return made
    return made.overloads[signature].entry_point


def _digest(function: Any) -> str:
    """Of all that is compiled into a loop: its code, numbers that it has by name, loops that it calls, and this file.

    Numba compiles again when the file of a loop is another, and does not look at those that the loop takes from.
    """
    code, known = function.__code__, function.__globals__
    own = [number for number in code.co_consts if not isinstance(number, CodeType)]
    modules = [vars(known[name]) for name in code.co_names if isinstance(known.get(name), ModuleType)]
    used = [(name, _reported(names[name])) for names in (known, *modules) for name in code.co_names if name in names]
    return sha256(repr((code.co_code, own, used)).encode() + _OWN).hexdigest()[:12]


def _reported(value: Any) -> str:
    if isinstance(value, int | float | str | tuple):
        return repr(value)
    return str(getattr(getattr(value, "py_func", value), "__qualname__", type(value).__name__))


@cache
def _log_the_wait() -> None:
    _events.info("kvcanary.compiling", seconds=SECONDS_TO_COMPILE)


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@loop()
def words_at(address, n):
    """[n] uint32 at an address."""
    return carray(_pointer(address), n, np.uint32)


@loop()
def flags_at(address, n):
    """[n] uint8 at an address."""
    return carray(_pointer(address), n, np.uint8)


@loop()
def longs_at(address, n):
    """[n] int64 at an address."""
    return carray(_pointer(address), n, np.int64)


@cache
def _record_of(struct: Any) -> Any:
    """The type of what lies at a struct's address, by the class of its fields' places."""
    return from_dtype(np.dtype([(name, np.int64) for name in struct._fields[:-1]], align=True))


@intrinsic
def nth(typing_context, struct, address, number):
    """One of several structs that lie behind each other, with its fields to read and write."""
    kind = _record_of(struct.instance_class)

    def generate(context, builder, signature, arguments):
        _, first, place = arguments
        distance = builder.mul(place, place.type(kind.size))
        return builder.inttoptr(builder.add(first, distance), context.get_value_type(kind))

    return kind(struct, types.int64, types.int64), generate


@loop()
def view(struct, address):
    """The struct at an address."""
    return nth(struct, address, 0)
