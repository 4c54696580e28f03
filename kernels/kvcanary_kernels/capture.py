"""Captures of CUDA graphs, which end when a graph or an event of somebody else's ends meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Python collects no garbage within: it may find graphs of an engine that is gone, and an error would end this one.

    "operation not permitted when stream is capturing (function reset)"; torch collected before every capture once.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
