"""What single draft steps in a graph of SGLang's are fed, written down by the graph itself.

SGLang captures the draft steps of a round in one graph while its scheduler is built. What a step was fed is gone when
the graph has run, so two copies a step are captured with it: of its positions, and of its slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvcanary.adapters.compatibility import missing, resolved
from kvcanary.adapters.hosted.guard import Guard
from kvcanary.adapters.hosted.replacements import Replacements
from kvcanary.adapters.sglang.compatibility import DRAFT_GRAPH

TRACE = "kvcanary_trace"


class StepTrace:
    """positions, slots: [steps, most] int64 on the device; of a step its rows with their branches, flat."""

    def __init__(self, steps: int, most: int, device: Any) -> None:
        self.positions, self.slots = torch.zeros(2, steps, most, dtype=torch.int64, device=device)
        self.step = 0

    def forward(self, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One step. SGLang runs all of them to warm up, some times, and then to capture them."""
        for kept, fed in ((self.positions, batch.positions), (self.slots, batch.out_cache_loc)):
            kept[self.step, : fed.numel()].copy_(fed.flatten())
        self.step = (self.step + 1) % len(self.positions)
        return method(batch, *args, **kwargs)


@contextmanager
def traced_graphs(settings: Any) -> Iterator[None]:
    """While a scheduler is built: graphs of its draft steps get a StepTrace, as `kvcanary_trace`.

    settings: of the server. One that does not draft has no such graphs; a release that does not have the names that are
    needed is built as it is, and refused by `attach`.
    """
    replaced = Replacements(Guard("sglang", "raise"))
    if getattr(settings, "speculative_algorithm", None) is not None and not missing([DRAFT_GRAPH]):
        replaced.replace(resolved(DRAFT_GRAPH.name), "capture_one_shape", _captured)
    try:
        yield
    finally:
        replaced.undo()


def _captured(method: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    if not hasattr(graph, TRACE):
        setattr(graph, TRACE, StepTrace(graph.speculative_num_steps - 1, graph.max_num_token, graph.device))
    replaced = Replacements(Guard("sglang", "raise"))
    replaced.replace(graph.model_runner, "forward", getattr(graph, TRACE).forward)
    try:
        return method(graph, *args, **kwargs)
    finally:
        replaced.undo()
