"""Plans: what a forward reads, row by row, and what it writes, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.pools.views import PoolView


@dataclass(eq=False, slots=True)
class ReadPlan:
    """What attention reads, row by row: the very arrays that attention reads, untouched until `check()`.

    indptr:           [rows + 1] int64
    indices:          [nnz] int64 slots in position order; the last `num_written` of a row are this forward's own
    requests:         request ids in batch order
    rows_per_request: 1, or the tree width of a draft substep (rows are request-major)
    prefix_lens:      [requests] int64, committed length that the plan believes
    num_written:      entries at the end of each row that this forward writes, an int or [rows] int64
    tree_mask:        [requests, N, N] bool, node n of a tree sees node m; None where the rows are no trees
    starts:           [rows] int64, position of each row's first entry, `window_start` of the first entry that it writes
                      or less; what lies before that window is not judged. None: every row begins at position 0

    In a pool with a slot map `indices` name slots of the full group, as the plans of writes do.
    """

    indptr: Tensor
    indices: Tensor
    requests: tuple[str, ...]
    rows_per_request: int
    prefix_lens: Tensor
    num_written: int | Tensor
    tree_mask: Tensor | None = None
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        requests, indices = len(self.requests), self.indices
        rows, written = requests * self.rows_per_request, self.num_written
        if not (
            self.indptr.shape == (rows + 1,)
            and self.prefix_lens.shape == (requests,)
            and len(indices.shape) == 1
            and self.indptr.dtype is self.prefix_lens.dtype is indices.dtype is torch.int64
        ):
            _expect_int64("indptr", self.indptr, rows + 1)
            _expect_int64("indices", indices)
            _expect_int64("prefix_lens", self.prefix_lens, requests)
        if isinstance(written, Tensor):
            _expect_int64("num_written", written, rows)
        elif written < 0:
            raise PlanError(f"num_written must not be negative, got {written}")
        if self.starts is not None:
            _expect_int64("starts", self.starts, rows)
        mask = self.tree_mask
        if mask is not None and (mask.dtype is not torch.bool or mask.dim() != 3 or mask.shape[1] != mask.shape[2]):
            raise PlanError(f"tree_mask must be [requests, N, N] bool, got {list(mask.shape)} {mask.dtype}")


@dataclass(eq=False, slots=True)
class WritePlan:
    """What a forward writes, in the order in which its K and V values are stored.

    slots, tokens, positions: [n] int64; tokens are those the record names (position + token_offset)
    parents:   [n] int64, index in this plan of the predecessor, -1 where the entry continues its row; None where
               every row is a chain. Rows are consecutive, as long as the read plan's `num_written`
    lineage:   [n] int64, of draft forwards whose rows write one entry each and whose requests are those of the draft
               forward before (same pool and step, index one less): the branch there, of as many a request as here, from
               whose entry the row goes on. It is compared with what the row reads, so it must not be derived from the
               slots that attention is given. None: rows go on from the entry before their own, whoever wrote it
    """

    slots: Tensor
    tokens: Tensor
    positions: Tensor
    parents: Tensor | None = None
    lineage: Tensor | None = None

    def __post_init__(self) -> None:
        slots, tokens, positions = self.slots, self.tokens, self.positions
        shape = slots.shape
        if not (
            len(shape) == 1
            and shape == tokens.shape == positions.shape
            and slots.dtype is tokens.dtype is positions.dtype is torch.int64
        ):
            for name, values in (("slots", slots), ("tokens", tokens), ("positions", positions)):
                _expect_int64(name, values, None if values is slots else shape[0])
        if self.parents is not None:
            _expect_int64("parents", self.parents, shape[0])
        if self.lineage is not None:
            _expect_int64("lineage", self.lineage, shape[0])
            if self.parents is not None:
                raise PlanError(
                    "parents and lineage must not be given together: a row of a tree's nodes has no lineage"
                )


def wrong_values(view: PoolView, n: int, values: Sequence[Tensor]) -> str:
    """What a layer stores and what it was given, where these differ."""
    shapes = dict.fromkeys(str(list(shape)) for shape in view.value_shapes(n))
    names = [*(part.argument for part in view.parts), *["another"] * len(values)]
    got = [f"{name} {list(value.shape)}" for name, value in zip(names, values, strict=False)]
    return f"stores {' and '.join(shapes)} a layer, got {' and '.join(got)}"


def _expect_int64(name: str, tensor: Tensor, size: int | None = None) -> None:
    shape = tensor.shape
    if tensor.dtype is not torch.int64 or len(shape) != 1 or (size is not None and shape[0] != size):
        wanted = "n" if size is None else size
        raise PlanError(f"{name} must be [{wanted}] int64, got {list(tensor.shape)} {tensor.dtype}")
