"""The device path: captured substeps over one pool, whose forwards store values that follow from their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary import PoolView
from kvcanary.captured.buffers import Batch, StaticBuffers
from kvcanary.captured.readback import Readback
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.records.state import CanaryState
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import FREE, NO_OWNER, RESERVED


@dataclass
class StaticRow:
    """One row of a static forward: what it reads in position order; the last `tokens` of it are written now."""

    uid: int
    ids: list[int]
    tokens: list[int]
    parents: list[int] | None = None  # by entry of this row, -1: continues the row
    prefix_len: int | None = None  # None: all that is not written now


class StaticRig:
    """A pool with its canary state and a bank; forwards store values that follow from token, position and layer."""

    PAGE_SIZE, NUM_SLOTS, LAYERS, HEADS, DIM = 4, 96, 2, 2, 4

    def __init__(self, device: str = "cpu") -> None:
        shape = self.LAYERS, self.NUM_SLOTS, 2, self.HEADS, self.DIM
        self.kv = torch.zeros(shape, device=device)
        k, v = ([self.kv[layer, :, part] for layer in range(self.LAYERS)] for part in (0, 1))
        self.state = CanaryState([PoolView("target", k, v, self.PAGE_SIZE)], seed=7)
        self.pool = self.state.pools[0]
        self.registry = SubstepRegistry(self.state)
        self.device = device
        self.skipped_layers: set[int] = set()
        self.before_close: Callable[[], None] = lambda: None

    def add(self, kind: str, index: int = 0, rows: int = 4, entries: int = 8, indices: int = 64, **settings: object):
        """A substep over buffers of its own; settings of both pass through."""
        names = ("is_tree", "has_truths", "has_roots", "has_lineage", "ancestors")
        own = {name: settings.pop(name) for name in names if name in settings}
        buffers = StaticBuffers.allocate(rows, entries, indices, device=self.device, **own)
        return self.registry.add("target", kind, index, buffers, **settings)

    def grant(self, uid: int, *pages: int, generation: int = 1) -> None:
        state, where = self.state, list(pages)
        state.generations[where], state.owners[where] = generation, uid
        state.page_states[where] = FREE if uid == NO_OWNER else RESERVED

    def batch(self, rows: list[StaticRow], **changes: object) -> Batch:
        """The batch of these rows; `changes` replace whole tensors, given as lists."""
        written = [len(row.tokens) for row in rows]
        bounds = [sum(written[:n]) for n in range(len(rows) + 1)]
        prefixes = [len(row.ids) - count for row, count in zip(rows, written, strict=True)]
        finals = [p if row.prefix_len is None else row.prefix_len for p, row in zip(prefixes, rows, strict=True)]
        own = [row.parents or range(-1, count - 1) for row, count in zip(rows, written, strict=True)]
        parents = [p if p < 0 else first + p for first, row in zip(bounds, own, strict=False) for p in row]
        positions: list[int] = []
        for entry, parent in enumerate(parents):
            row = next(r for r in range(len(rows)) if entry < bounds[r + 1])
            positions.append(prefixes[row] if parent < 0 else positions[parent] + 1)
        arrays: dict[str, object] = {
            "indptr": [sum(len(row.ids) for row in rows[:n]) for n in range(len(rows) + 1)],
            "indices": [slot for row in rows for slot in row.ids],
            "bounds": bounds,
            "slots": [
                slot for row, count in zip(rows, written, strict=True) for slot in row.ids[len(row.ids) - count :]
            ],
            "tokens": [token for row in rows for token in row.tokens],
            "positions": positions,
            "prefix_lens": finals,
            "uids": [row.uid for row in rows],
            "parents": parents if any(row.parents for row in rows) else None,
        } | changes
        return Batch(**{n: None if a is None else _ints(a).to(self.device) for n, a in arrays.items()})

    def values(self, layer: int, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [n, heads, dim] of one layer."""
        seeds = (tokens * 131 + positions * 7 + layer)[:, None, None].float()
        place = torch.arange(self.HEADS * self.DIM, device=tokens.device).view(self.HEADS, self.DIM)
        return (seeds + place).sin(), (seeds - place).cos()

    def body(self, substep: CapturedSubstep) -> None:
        """A forward with all its hooks, over static buffers."""
        forward = substep.forward
        if substep.is_deferred:
            substep.admit()
        substep.open()
        for layer in range(self.LAYERS):
            if layer not in self.skipped_layers:
                substep.store(layer, *self.values(layer, forward.tokens, forward.positions))
        self.before_close()
        substep.close(joins=not substep.is_deferred)

    def run(self, substep: CapturedSubstep, batch: Batch, step: int = 1) -> Readback:
        """One forward of this batch in this step, and what it found."""
        self.registry.begin_step(step)
        self.registry.load(substep, batch)
        self.body(substep)
        self.registry.join()
        return self.read_back()

    def read_back(self) -> Readback:
        """What has fired and run until now, as of the step that runs."""
        pending = self.registry.begin_readback()
        if self.pool.records.is_cuda:
            torch.cuda.synchronize()
        return self.registry.read_back(pending, self.registry.now & record.MASK_32)


def _ints(values: list[int] | range) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
