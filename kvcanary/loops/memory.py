"""Memory: the decorator of compiled loops, and how they see memory that is given by its address.

An address costs nothing to pass; an array costs as much as a short loop over it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import structlog
from numba import carray, njit, types
from numba.extending import intrinsic

SECONDS_TO_COMPILE = 25  # all loops, on one core of a server

_events = structlog.get_logger("kvcanary")


def loop(signature: str | None = None) -> Callable[[Any], Any]:
    """Compile at import, or take from the disk what an earlier process has compiled; without a signature: inline."""
    settings = {"nogil": True, "cache": True, "error_model": "numpy"}
    if signature is None:
        return njit(**settings)

    def compiled(function: Any) -> Any:
        made = njit(signature, **settings)(function)
        if made.stats.cache_misses:
            _tell_of_the_wait()
        return made

    return compiled


@cache
def _tell_of_the_wait() -> None:
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
