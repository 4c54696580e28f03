"""Content lanes of stored values and of slots, in few operations.

The arithmetic is that of `fingerprint_torch`. So many layers are taken at a time that their float64 copy stays in the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcanary.state import PoolState
from kvcanary_kernels.fingerprint import join, keyed_sums
from kvcanary_kernels.record import signed

PORTION_BYTES = 1 << 20  # of the float64 copy


def lanes_of_rows(pool: PoolState, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a by layer [layers, n] and lane b over all layers [n] of rows [layers, n, words_per_row] int32."""
    return _started(pool, _lanes(pool, rows.shape[1], rows.__getitem__, pool.keys.pieces))


def lanes_of_layer(pool: PoolState, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a [n] of one layer's rows [n, words_per_row] int32, and what they add to lane b [n]."""
    table = pool.keys.pieces[layer : layer + 1]
    lane_a, lane_b = _lanes(pool, len(rows), rows[None].__getitem__, table)[0].unbind(1)
    return lane_a + pool.keys.start_a[layer], lane_b


def lanes_of_slots(pool: PoolState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a [layers, n] and lane b [n] of the bytes that lie in the pool now."""
    return _started(pool, _lanes(pool, len(slots), lambda layers: pool.rows.gather(slots, layers), pool.keys.pieces))


def lane_a_of_slots(pool: PoolState, slots: Tensor) -> Tensor:
    """[layers, n]: lane a alone."""
    table = pool.keys.pieces[:, :, : pool.keys.pieces.shape[2] // 2]
    lanes = _lanes(pool, len(slots), lambda layers: pool.rows.gather(slots, layers), table)
    return lanes[:, :, 0].add_(pool.keys.start_a[:, None])


def _lanes(pool: PoolState, n: int, rows_of: Callable[[slice], Tensor], table: Tensor) -> Tensor:
    """[layers, n, lanes] without starts; `rows_of` gives the rows [some, n, words_per_row] of some of the layers."""
    layers, words, _ = table.shape
    num_pieces = pool.keys.pieces.shape[2] // 2  # of one lane's keys
    step = max(1, PORTION_BYTES // (8 * words * max(n, 1)))
    portions = [slice(first, first + step) for first in range(0, layers, step)]
    sums = joined([keyed_sums(rows_of(portion), table[portion]) for portion in portions])
    return torch.stack([join(lane, pool.keys) for lane in sums.split(num_pieces, 2)], 2)


def _started(pool: PoolState, lanes: Tensor) -> tuple[Tensor, Tensor]:
    """Both lanes from their sums [layers, n, 2]."""
    lane_a, lane_b = lanes.unbind(2)
    return lane_a + pool.keys.start_a[:, None], lane_b.sum(0).add_(signed(pool.keys.start_b))


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` that leaves a single dense part as it is."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim)
