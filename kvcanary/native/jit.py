"""The decorator of compiled loops, and how they see memory that is given by its address.

An address costs nothing to pass; an array costs as much as a short loop over it. A struct (layout.py) is seen by its
fields: `request_at(address).num_tokens`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import structlog
from numba import carray, from_dtype, njit, types
from numba.extending import intrinsic

from kvcanary.native import layout

SECONDS_TO_COMPILE = 25  # all loops, on one core of a server

_events = structlog.get_logger("kvcanary")
_OWN = Path(__file__).read_bytes()


def loop(signature: str | None = None) -> Callable[[Any], Any]:
    """Compile at import, or take from the disk what an earlier process has compiled; without a signature: inline."""

    def compiled(function: Any) -> Any:
        function.__qualname__ += f"-{_digest(function)}"  # the name of its file on the disk
        made = njit(signature, nogil=True, cache=True, error_model="numpy")(function)
        if signature is not None and made.stats.cache_misses:
            _log_the_wait()
        return made

    return compiled


def entry(made: Any) -> Callable[..., Any]:
    """A compiled loop as Python calls it: where all that it takes are numbers, whose types nobody has to find out."""
    (signature,) = made.signatures
    if not all(isinstance(kind, types.Integer | types.Boolean) for kind in signature):
        return made
    found: Callable[..., Any] = made.overloads[signature].entry_point
    return found


def _digest(function: Any) -> str:
    """Of all that is compiled into a loop: its code, numbers that it has by name, loops that it calls, and this file.

    Numba compiles again when the file of a loop is another, and does not look at those that the loop takes from.
    """
    code, known = function.__code__, function.__globals__
    own = [number for number in code.co_consts if not isinstance(number, CodeType)]
    used = [(name, _reported(known[name])) for name in code.co_names if name in known]
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


def struct_at(struct: Any) -> Any:
    """The loop that gives a struct by its address."""
    kind = from_dtype(np.dtype([(name, np.int64) for name in struct._fields[:-1]], align=True))

    def at(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    at.__qualname__ = repr(struct)  # loops are compiled again where a field has another place
    return intrinsic(at)


pages_at = struct_at(layout.PAGES)
asked_at = struct_at(layout.ASKED)
tables_at = struct_at(layout.BOOKS)
chain_at = struct_at(layout.ROW_CHAIN)
fact_at = struct_at(layout.FACT)
final_at = struct_at(layout.FINAL)
forward_at = struct_at(layout.FORWARD)
line_at = struct_at(layout.LINE)
move_at = struct_at(layout.MOVE)
piece_at = struct_at(layout.PIECE)
pool_at = struct_at(layout.POOL)
queue_at = struct_at(layout.QUEUE)
quiet_at = struct_at(layout.QUIET)
range_at = struct_at(layout.RANGE)
request_at = struct_at(layout.REQUEST)
row_end_at = struct_at(layout.ROW_END)
run_at = struct_at(layout.RUN)
slice_at = struct_at(layout.SLICE)
spread_at = struct_at(layout.SPREAD)
taken_at = struct_at(layout.TAKEN)
uncollected_at = struct_at(layout.UNCOLLECTED)
said_at = struct_at(layout.SAID)
