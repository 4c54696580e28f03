"""Captures of CUDA graphs, which fail where an older graph is given back meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Python collects no garbage within: it may find the graphs of an engine that is gone, and giving one back is an
    "operation not permitted when stream is capturing". `torch.cuda.graph` does not see to that.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
