"""Stamps: when a stream, or a captured graph, passed a place, written by a kernel of one thread.

An event is no clock for two graphs of which one has branches: behind its node the next launch comes 6 us later in a
graph of one branch, and 11 us later in one of several (an H200), so that a branch would be charged for being timed.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor

from kvcanary_kernels.record.device import tl, triton


def stamp(out: Tensor) -> None:
    """The GPU's clock in nanoseconds, when all that was launched before has ended. May be captured. out: [1] int64."""
    _stamp_kernel[(1,)](out, num_warps=1)


@triton.jit
def _stamp_kernel(out):
    tl.store(out, tl.extra.cuda.globaltimer())
