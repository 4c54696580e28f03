"""Argument checks that an operation and its torch reference share."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record


def expect_int64(n: int, *, may_broadcast: bool = False, **tensors: Tensor | None) -> None:
    """Each tensor is a contiguous [n] int64 (or [1] where it may broadcast)."""
    for name, t in tensors.items():
        if t is None:
            continue
        right_size = t.dim() == 1 and (t.numel() == n or (may_broadcast and t.numel() == 1))
        if not right_size or t.dtype is not torch.int64 or not t.is_contiguous():
            shape = f"[{n}] or [1]" if may_broadcast else f"[{n}]"
            raise ValueError(f"{name} must be contiguous {shape} int64, got {list(t.shape)} {t.dtype}")


def expect_records(records: Tensor) -> None:
    if records.dtype is not torch.int64 or records.dim() != 2 or records.shape[1] != record.COLUMNS:
        raise ValueError(f"records must be [num_slots, 8] int64, got {list(records.shape)} {records.dtype}")
    if not records.is_contiguous():
        raise ValueError(f"records must be contiguous, got strides {records.stride()}")


def expect_layered(num_layers: int, n: int, **tensors: Tensor | None) -> None:
    """Each tensor is [num_layers, n] int64 whose rows are dense (any layer stride)."""
    for name, t in tensors.items():
        if t is None:
            continue
        if t.shape != (num_layers, n) or t.dtype is not torch.int64 or (n > 1 and t.stride(1) != 1):
            raise ValueError(f"{name} must be [{num_layers}, {n}] int64 with dense rows, got {list(t.shape)} {t.dtype}")


def expect_dense(shape: tuple[int, ...], dtype: torch.dtype = torch.int64, **tensors: Tensor) -> None:
    """Each tensor is contiguous, of this shape and type."""
    for name, t in tensors.items():
        if t.shape != shape or t.dtype is not dtype or not t.is_contiguous():
            wanted = f"{list(shape)} {str(dtype).removeprefix('torch.')}"
            raise ValueError(f"{name} must be contiguous {wanted}, got {list(t.shape)} {t.dtype}")


def live_indices(slots: Tensor, num_slots: int, num_live: Tensor | None = None) -> Tensor | slice:
    """An index of the entries of a torch reference that may touch memory: live, and a slot of the pool."""
    n = slots.numel()
    live = n if num_live is None else int(num_live)
    if n == 0:
        return slice(None)
    low, high = torch.aminmax(slots)
    if live >= n and int(low) >= 0 and int(high) < num_slots:
        return slice(None)
    valid = (slots >= 0) & (slots < num_slots)
    valid[max(live, 0) :] = False
    return valid.nonzero().squeeze(1)
