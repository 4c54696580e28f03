"""StaticBuffers: the inputs of one captured forward at fixed addresses, filled with a live batch and padding."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.native.layout import UNKNOWN
from kvcanary_kernels.judge.forward import ForwardPlan

NULL_SLOT = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """What the live rows of one forward read and write, in tensors as of `ForwardPlan`; all int64, on any device.

    indptr: [rows + 1], from 0, where rows begin in `indices`
    """

    indptr: Tensor
    indices: Tensor
    bounds: Tensor
    slots: Tensor
    tokens: Tensor
    positions: Tensor
    prefix_lens: Tensor
    uids: Tensor
    parents: Tensor | None = None
    truths: Tensor | None = None
    roots: Tensor | None = None
    lineage: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.uids.numel()

    @property
    def num_entries(self) -> int:
        return self.slots.numel()


INPUTS = tuple(field.name for field in fields(Batch))


@dataclass(frozen=True, eq=False, kw_only=True)
class StaticBuffers(Batch):
    """A batch of the bucket's size, and how many of its rows are live; the engine's own tensors, or `allocate`d.

    num_live:  [1], rows at and after it are padding
    ancestors: entries of a row between its prefix and what it writes, i for draft[i]
    """

    num_live: Tensor
    ancestors: int = 0

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        max_entries: int,
        max_indices: int,
        *,
        device: torch.device | str = "cpu",
        is_tree: bool = False,
        has_truths: bool = False,
        has_roots: bool = False,
        has_lineage: bool = False,
        ancestors: int = 0,
    ) -> StaticBuffers:
        """Buffers of this size, without a live row."""
        sizes = {"indptr": max_rows + 1, "indices": max_indices, "bounds": max_rows + 1, "num_live": 1}
        sizes |= dict.fromkeys(("slots", "tokens", "positions"), max_entries)
        sizes |= dict.fromkeys(("prefix_lens", "uids"), max_rows)
        sizes |= {"parents": max_entries} if is_tree else {}
        by_row = {"truths": has_truths, "roots": has_roots, "lineage": has_lineage}
        sizes |= {name: max_rows for name, is_fed in by_row.items() if is_fed}
        with torch.inference_mode(False):
            return cls(
                **{name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in sizes.items()},
                ancestors=ancestors,
            )

    def plan(self) -> ForwardPlan:
        """The same tensors as kernels take them."""
        own = {name: getattr(self, name) for name in INPUTS if name != "indptr"}
        own |= {"row_starts": self.indptr[:-1], "row_ends": self.indptr[1:]}
        return ForwardPlan(**own, num_live=self.num_live, ancestors=self.ancestors)

    def fits(self, batch: Batch) -> bool:
        """Whether a batch is not larger than these buffers."""
        pairs = (batch.uids, self.uids), (batch.slots, self.slots), (batch.indices, self.indices)
        return all(live.numel() <= static.numel() for live, static in pairs)

    def fill(self, batch: Batch) -> None:
        """Copy a batch in and pad it: empty rows, null slots. Nothing is allocated, nothing waits for the device."""
        self._check(batch)
        padding = {"indptr": batch.indices.numel(), "bounds": batch.num_entries, "parents": -1, "prefix_lens": UNKNOWN}
        for name in INPUTS:
            static, live = getattr(self, name), getattr(batch, name)
            if live is not None:
                n = live.numel()
                static[:n].copy_(live, non_blocking=True)
                static[n:].fill_(padding.get(name, NULL_SLOT))
        self.num_live.fill_(batch.num_rows)

    def _check(self, batch: Batch) -> None:
        if not self.fits(batch):
            raise PlanError(
                f"a batch must fit its bucket of {self.num_rows} rows, {self.num_entries} entries and "
                f"{self.indices.numel()} indices, got {batch.num_rows}, {batch.num_entries} and {batch.indices.numel()}"
            )
        for name in INPUTS:
            static, live = getattr(self, name), getattr(batch, name)
            if (static is None) != (live is None):
                which = "a batch with" if static is None else "a batch without"
                raise PlanError(f"{name} must be given in every batch of a bucket or in none, got {which} {name}")


def empty_batch(buffers: StaticBuffers) -> Batch:
    """A batch without rows for these buffers: all of it is padding."""
    none: dict[str, Any] = {name: None if getattr(buffers, name) is None else buffers.uids[:0] for name in INPUTS}
    zero = torch.zeros(1, dtype=torch.int64, device=buffers.uids.device)
    return Batch(**none | {"indptr": zero, "bounds": zero})
