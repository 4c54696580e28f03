"""Faults of single draft steps within SGLang's graph of them: captured with the steps, armed by a number on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: By name: what a step is fed is off by one, its positions or its slots, in which step.
FAULTS = {
    "positions of the first step": (0, 0),
    "positions of the second step": (0, 1),
    "slots of the first step": (1, 0),
    "slots of the second step": (1, 1),
}


@contextmanager
def harmed_steps() -> Iterator[torch.Tensor]:
    """While graphs are captured: [positions or slots, step] int64, how far each of them is off; all zero at first.

    A step's positions are right again behind it, so that nothing is left over behind the graph.
    """
    from kvcanary.adapters.sglang.step_trace import StepTrace

    off, forward = torch.zeros(2, 8, dtype=torch.int64, device="cuda"), StepTrace.forward

    def harmed(trace: StepTrace, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        positions, slots = off[:, trace.step]
        right = batch.out_cache_loc
        batch.out_cache_loc = right + slots
        batch.positions.add_(positions)
        output = forward(trace, method, batch, *args, **kwargs)
        batch.positions.sub_(positions)
        batch.out_cache_loc = right
        return output

    StepTrace.forward = harmed  # type: ignore[method-assign]
    try:
        yield off
    finally:
        StepTrace.forward = forward  # type: ignore[method-assign]
