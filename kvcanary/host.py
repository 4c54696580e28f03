"""HostPool: a pool in host memory as the compiled loops take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.views import PoolView
from kvcanary_kernels.record import Keys, signed
from kvcanary_kernels.rows import WORD_BYTES

Longs = NDArray[np.int64]

#: What the loop that seals a forward has seen: an entry that was judged, a position that is not the parent's plus one,
#: a null slot, a page that is not known as written.
REWRITTEN, MISPLACED, NULL_WRITTEN, PAGE_FRESH = 1, 2, 4, 8


class DensePart(NamedTuple):
    """Values of one part of a row as a loop can read them: type, strides within a row, bytes an element, words."""

    dtype: torch.dtype
    inner: tuple[int, ...]
    size: int
    words: int


@dataclass(frozen=True, eq=False)
class HostPool:
    """Arrays over the memory of one pool's tensors, and numbers that loops are given by value; all int64.

    parts:      of a row
    address:    [pieces, layers] of slot 0
    layout:     [pieces, fields] what each `Piece` of a row says
    keys:       [layers, 2, words] int32, of lane a and lane b
    layer_keys: by layer, the address of its keys
    start_a:    [layers], and the same as integers: `starts`
    content_a:  [layers, num_slots]
    records, expected: [num_slots, 8]
    """

    parts: tuple[DensePart, ...]
    address: Longs
    layout: Longs
    keys: Tensor
    layer_keys: list[int]
    words: int
    start_a: Longs
    starts: list[int]
    start_b: int
    content_a: Longs
    records: Longs
    expected: Longs


def host_pool(view: PoolView, keys: Keys, content_a: Tensor, records: Tensor, expected: Tensor) -> HostPool | None:
    """None where the pool is not in host memory."""
    if not records.is_cpu:
        return None
    both = torch.stack([keys.lane_a, keys.lane_b], 1)
    return HostPool(
        parts=tuple(_dense_part(part.shape, part.dtype) for part in view.parts),
        address=view.rows.ptrs.numpy(),
        layout=np.array(view.rows.pieces, np.int64),
        keys=both,
        layer_keys=[layer.data_ptr() for layer in both],
        words=view.rows.words_per_row,
        start_a=keys.start_a.numpy(),
        starts=keys.start_a.tolist(),
        start_b=signed(keys.start_b),
        content_a=content_a.numpy(),
        records=records.numpy(),
        expected=expected.numpy(),
    )


def _dense_part(shape: tuple[int, ...], dtype: torch.dtype) -> DensePart:
    value = torch.empty((1, *shape), dtype=dtype, device="meta")
    return DensePart(dtype, value.stride()[1:], dtype.itemsize, value.numel() * dtype.itemsize // WORD_BYTES)
