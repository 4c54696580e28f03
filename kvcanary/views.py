"""What the canary knows of an engine: its pools, what a forward reads, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.errors import PlanError


@dataclass(frozen=True, eq=False)
class PoolView:
    """The K and V tensors of one model; all pools of a manager share slot and page ids.

    k, v:         one tensor a layer, [num_slots, kv_heads, head_dim], rows dense, any slot stride
    token_offset: 1 where the slot of position p holds (token p + 1, hidden p), as EAGLE drafts do
    null_slots:   slots [0, null_slots) are where padding may write and read; page 0 unless stated
    """

    name: str
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    page_size: int
    token_offset: int = 0
    null_slots: int = -1

    def __post_init__(self) -> None:
        if self.null_slots < 0:
            object.__setattr__(self, "null_slots", self.page_size)
        object.__setattr__(self, "k", tuple(self.k))
        object.__setattr__(self, "v", tuple(self.v))
        _check_numbers(self)
        _check_layers(self)

    @property
    def num_layers(self) -> int:
        return len(self.k)

    @property
    def num_slots(self) -> int:
        return self.k[0].shape[0]

    @property
    def num_pages(self) -> int:
        return -(-self.num_slots // self.page_size)

    @property
    def kv_heads(self) -> int:
        return self.k[0].shape[1]

    @property
    def head_dim(self) -> int:
        return self.k[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.k[0].dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: K and V of all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.k[0].element_size()


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """What attention reads, row by row: the very arrays that attention reads, untouched until `check()`.

    indptr:           [rows + 1] int64
    indices:          [nnz] int64 slots in position order; the last `num_written` of a row are this forward's own
    requests:         request ids in batch order
    rows_per_request: 1, or the tree width of a draft substep (rows are request-major)
    prefix_lens:      [requests] int64, committed length that the plan believes
    num_written:      entries at the end of each row that this forward writes, an int or [rows] int64
    tree_mask:        [requests, N, N] bool, node n of a tree sees node m; None where the rows are no trees
    """

    indptr: Tensor
    indices: Tensor
    requests: tuple[str, ...]
    rows_per_request: int
    prefix_lens: Tensor
    num_written: int | Tensor
    tree_mask: Tensor | None = None

    def __post_init__(self) -> None:
        rows = len(self.requests) * self.rows_per_request
        _expect_int64("indptr", self.indptr, rows + 1)
        _expect_int64("indices", self.indices)
        _expect_int64("prefix_lens", self.prefix_lens, len(self.requests))
        if isinstance(self.num_written, Tensor):
            _expect_int64("num_written", self.num_written, rows)
        elif self.num_written < 0:
            raise PlanError(f"num_written must not be negative, got {self.num_written}")
        mask = self.tree_mask
        if mask is not None and (mask.dtype is not torch.bool or mask.dim() != 3 or mask.shape[1] != mask.shape[2]):
            raise PlanError(f"tree_mask must be [requests, N, N] bool, got {list(mask.shape)} {mask.dtype}")


@dataclass(frozen=True, eq=False)
class WritePlan:
    """What a forward writes, in the order in which its K and V values are stored.

    slots, tokens, positions: [n] int64; tokens are those the record names (position + token_offset)
    parents:   [n] int64, index in this plan of the predecessor, -1 where the entry continues its row; None where
               every row is a chain. Rows are consecutive, as long as the read plan's `num_written`
    """

    slots: Tensor
    tokens: Tensor
    positions: Tensor
    parents: Tensor | None = None

    def __post_init__(self) -> None:
        _expect_int64("slots", self.slots)
        n = self.slots.shape[0]
        _expect_int64("tokens", self.tokens, n)
        _expect_int64("positions", self.positions, n)
        if self.parents is not None:
            _expect_int64("parents", self.parents, n)


def _expect_int64(name: str, tensor: Tensor, size: int | None = None) -> None:
    if tensor.dtype is not torch.int64 or tensor.dim() != 1 or (size is not None and tensor.shape[0] != size):
        wanted = "n" if size is None else size
        raise PlanError(f"{name} must be [{wanted}] int64, got {list(tensor.shape)} {tensor.dtype}")


def _check_numbers(view: PoolView) -> None:
    for name, low in (("page_size", 1), ("token_offset", 0)):
        if getattr(view, name) < low:
            raise PlanError(f"pool {view.name!r}: {name} must be at least {low}, got {getattr(view, name)}")
    if not view.k or len(view.k) != len(view.v):
        raise PlanError(f"pool {view.name!r} needs one K and one V a layer, got {len(view.k)} and {len(view.v)}")


def _check_layers(view: PoolView) -> None:
    first = view.k[0]
    if first.dim() != 3:
        raise PlanError(f"pool {view.name!r}: k[0] must be [num_slots, kv_heads, head_dim], got {list(first.shape)}")
    for name, tensor in _layers(view):
        if tensor.shape != first.shape or tensor.dtype is not first.dtype:
            raise PlanError(
                f"pool {view.name!r}: {name} is {list(tensor.shape)} {tensor.dtype}, "
                f"k[0] is {list(first.shape)} {first.dtype}"
            )
        if tensor.stride()[1:] != (view.head_dim, 1):
            raise PlanError(f"pool {view.name!r}: rows of {name} must be dense, got strides {tensor.stride()}")
    row_bytes = view.kv_heads * view.head_dim * first.element_size()
    if row_bytes % 4:
        raise PlanError(f"pool {view.name!r}: a row must be whole 32-bit words, got {row_bytes} bytes")


def _layers(view: PoolView) -> Iterator[tuple[str, Tensor]]:
    for part in ("k", "v"):
        for layer, tensor in enumerate(getattr(view, part)):
            yield f"{part}[{layer}]", tensor
