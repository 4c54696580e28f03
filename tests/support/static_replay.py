"""Replay: a body with its hooks, recorded once for each bucket and run with smaller batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcanary.captured.buffers import Batch, StaticBuffers, empty_batch
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.errors import PlanError

Body = Callable[[], None]


def run_once(body: Body) -> Body:
    """A record without a graph, on any device: the body has run, and will run again."""
    body()
    return body


class StaticReplay:
    """What an engine's graph runner does, with bodies recorded by `record`: as it is called, or into a CUDA graph."""

    def __init__(self, registry: SubstepRegistry, record: Callable[[Body], Body] = run_once) -> None:
        self._registry, self._record = registry, record
        self._buckets: list[tuple[tuple[CapturedSubstep, ...], Body]] = []

    def capture(self, substeps: Sequence[CapturedSubstep], body: Body) -> None:
        """Record a body that opens, stores and closes these substeps, each once; all over StaticBuffers."""
        for buffers in _buffers_of(substeps):
            buffers.fill(empty_batch(buffers))
        self._buckets.append((tuple(substeps), self._record(body)))
        self._buckets.sort(key=lambda bucket: bucket[0][0].forward.num_rows)

    def replay(self, batches: Sequence[Batch]) -> int:
        """Run the smallest bucket that holds one batch a substep; its rows. Outputs beyond the batch mean nothing."""
        substeps, run = self._bucket_for(batches)
        for substep, batch in zip(substeps, batches, strict=True):
            self._registry.load(substep, batch)
        run()
        return substeps[0].forward.num_rows

    def _bucket_for(self, batches: Sequence[Batch]) -> tuple[tuple[CapturedSubstep, ...], Body]:
        for substeps, run in self._buckets:
            if len(substeps) == len(batches) and all(map(_fits, substeps, batches)):
                return substeps, run
        sizes = ", ".join(str(batch.num_rows) for batch in batches)
        buckets = ", ".join(str(substeps[0].forward.num_rows) for substeps, _ in self._buckets) or "none"
        raise PlanError(f"batches must fit a captured bucket, got {sizes} rows for {buckets}: capture a larger one")


def _buffers_of(substeps: Sequence[CapturedSubstep]) -> list[StaticBuffers]:
    if not substeps:
        raise PlanError("capture() needs at least one substep: a batch is copied into its buffers")
    without = [str(substep) for substep in substeps if substep.buffers is None]
    if without:
        raise PlanError(f"capture() needs substeps over StaticBuffers, got {', '.join(without)} over others' tensors")
    return [substep.buffers for substep in substeps if substep.buffers is not None]


def _fits(substep: CapturedSubstep, batch: Batch) -> bool:
    return substep.buffers is not None and substep.buffers.fits(batch)
