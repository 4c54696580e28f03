"""Replay: a body with its hooks, recorded once for each bucket and run with smaller batches.

`StaticReplay` calls the body again, on any device; `CudaGraphReplay` launches a captured graph. Both pad the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvcanary.captured.buffers import Batch, StaticBuffers, empty_batch
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.errors import PlanError
from kvcanary_kernels.record.capture import garbage_kept

Body = Callable[[], None]


class Replay(Protocol):
    """What an engine's graph runner does."""

    def capture(self, substeps: Sequence[CapturedSubstep], body: Body) -> None:
        """Record a body that opens, stores and closes these substeps, each once; all over StaticBuffers."""

    def replay(self, batches: Sequence[Batch]) -> int:
        """Run the smallest bucket that holds one batch a substep; its rows. Outputs beyond the batch mean nothing."""


class StaticReplay:
    """Replay without graphs: the body runs again over the same static buffers."""

    def __init__(self, bank: SubstepRegistry) -> None:
        self._bank = bank
        self._buckets: list[tuple[tuple[CapturedSubstep, ...], Body]] = []

    def capture(self, substeps: Sequence[CapturedSubstep], body: Body) -> None:
        for buffers in _buffers_of(substeps):
            buffers.fill(empty_batch(buffers))
        self._buckets.append((tuple(substeps), self._record(body)))
        self._buckets.sort(key=lambda bucket: bucket[0][0].forward.num_rows)

    def replay(self, batches: Sequence[Batch]) -> int:
        substeps, run = self._bucket_for(batches)
        for substep, batch in zip(substeps, batches, strict=True):
            self._bank.load(substep, batch)
        run()
        return substeps[0].forward.num_rows

    def _record(self, body: Body) -> Body:
        """What replay runs; the body has run once, with padding only."""
        body()
        return body

    def _bucket_for(self, batches: Sequence[Batch]) -> tuple[tuple[CapturedSubstep, ...], Body]:
        for substeps, run in self._buckets:
            if len(substeps) == len(batches) and all(map(_fits, substeps, batches)):
                return substeps, run
        sizes = ", ".join(str(batch.num_rows) for batch in batches)
        buckets = ", ".join(str(substeps[0].forward.num_rows) for substeps, _ in self._buckets) or "none"
        raise PlanError(f"batches must fit a captured bucket, got {sizes} rows for {buckets}: capture a larger one")


class CudaGraphReplay(StaticReplay):
    """Replay of captured CUDA graphs; all buckets share one memory pool, so only one runs at a time."""

    def __init__(self, bank: SubstepRegistry) -> None:
        super().__init__(bank)
        self._pool = torch.cuda.graph_pool_handle()

    def _record(self, body: Body) -> Body:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            body()  # compiles every kernel before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with garbage_kept(), torch.cuda.graph(graph, pool=self._pool):
            body()
        return graph.replay


def _buffers_of(substeps: Sequence[CapturedSubstep]) -> list[StaticBuffers]:
    if not substeps:
        raise PlanError("capture() needs at least one substep: a batch is copied into its buffers")
    without = [str(substep) for substep in substeps if substep.buffers is None]
    if without:
        raise PlanError(f"capture() needs substeps over StaticBuffers, got {', '.join(without)} over others' tensors")
    return [substep.buffers for substep in substeps if substep.buffers is not None]


def _fits(substep: CapturedSubstep, batch: Batch) -> bool:
    return substep.buffers is not None and substep.buffers.fits(batch)
