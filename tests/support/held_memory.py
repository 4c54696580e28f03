"""Device memory over many steps: what is held at most does not grow."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from spec_engine import Engine

SOME_BLOCKS = 8 * 512  # bytes


def expect_memory_to_stay(engine: Engine, run: Callable[[], object], first: int, last: int) -> None:
    """Over so many ``last`` steps the allocator never comes to hold more than it did over the ``first`` ones.

    It varies by some blocks: what a second stream has used is taken back by the next allocation only. So the most of
    two spans is compared, not what two moments have, and SOME_BLOCKS more are none: one for every ``run``, which takes
    the engine some steps further, would be.
    """

    def most_held(num_steps: int) -> int:
        held = []
        while engine.metrics.num_steps < num_steps:
            run()
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
        return max(held)

    run()
    gc.collect()  # engines of other tests, which would go meanwhile
    before = most_held(first)
    assert most_held(last) <= before + SOME_BLOCKS
