"""Checks of the operands of paged attention: each a ValueError that names one, what it must be and what it is."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.content.reads import SHIFTS, ReadSums

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
POOL_FLOATS = (*FLOATS, torch.float8_e4m3fn)


def expect_rows(name: str, t: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """[entries, heads, dim] of such numbers, whose heads are dense."""
    fits = t.dim() == 3 and all(size in (None, own) for size, own in zip(shape, t.shape, strict=True))
    if not fits or t.dtype not in dtypes or (t.shape[2] > 1 and t.stride(2) != 1):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} must be [{wanted}] with dense heads of {' or '.join(str(d) for d in dtypes)}, "
            f"got {list(t.shape)} {t.dtype} with strides {t.stride()}"
        )


def expect_mask(mask: Tensor, num_rows: int, max_q_len: int, causal: bool) -> None:
    fits = mask.dim() == 3 and mask.shape[0] >= num_rows and mask.shape[1] == mask.shape[2] >= max_q_len
    if not fits or mask.dtype is not torch.bool or not mask.is_contiguous():
        raise ValueError(
            f"tree_mask must be contiguous [>= {num_rows}, N, N] bool with N >= {max_q_len}, "
            f"got {list(mask.shape)} {mask.dtype}"
        )
    if not causal:
        raise ValueError("tree_mask says what each query sees of the new keys, so causal must stay True, got False")


def expect_scales(num_slots: int, **scales: float | Tensor | None) -> None:
    for name, scale in scales.items():
        if not isinstance(scale, Tensor):
            continue
        if scale.dtype is not torch.float32 or (scale.numel() != 1 and scale.shape != (num_slots,)):
            raise ValueError(
                f"{name} must be one float32 number, or one for each of {num_slots} slots, "
                f"got {list(scale.shape)} {scale.dtype}"
            )


def expect_reads(
    reads: ReadSums, k: Tensor, num_places: int, window: int | None, *scales: float | Tensor | None
) -> None:
    if window is not None:
        raise ValueError(f"reads need whole rows, got a window of {window} keys")
    shape = (2, k.shape[1], k.element_size(), SHIFTS, k.shape[2])
    if reads.factors.shape != shape or reads.rows.num_slots != k.shape[0]:
        raise ValueError(
            f"reads must be of a pool of {k.shape[0]} slots with factors {list(shape)}, "
            f"got {reads.rows.num_slots} and {list(reads.factors.shape)}"
        )
    per_slot = [isinstance(scale, Tensor) and scale.numel() > 1 for scale in scales]
    if reads.scale_keys.numel() and not all(per_slot):
        raise ValueError("reads cover scales of each slot, so k_scale and v_scale must be [slots], got others")
    if reads.sums.dtype is not torch.int64 or reads.sums.dim() != 1 or reads.sums.numel() < num_places:
        raise ValueError(f"sums must be [>= {num_places}] int64, got {list(reads.sums.shape)} {reads.sums.dtype}")
