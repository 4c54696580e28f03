"""Content lanes of stored values and of slots, in few operations.

The arithmetic is that of `fingerprint_torch`: words times key pieces, summed exactly in float64. Rows are taken in
portions whose float64 copy stays in the cache, which is three times faster than all at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary.state import PoolState
from kvcanary_kernels.record import signed

PORTION_BYTES = 1 << 20  # of the float64 copy


def lanes_of_values(pool: PoolState, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a by layer [layers, n] and lane b over all layers [n] of values [2 * layers, n, row], K before V."""
    sums = [_keyed_sums(pool, part, pool.part_keys) for part in parts.split(portion(pool), 1)]
    lanes = _joined(sums).unflatten(0, (-1, 2)).sum(1)  # [layers, n, 2]
    return _started(pool, lanes)


def lanes_of_layer(pool: PoolState, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a [n] of one layer's values, and what they add to lane b [n]."""
    table = pool.part_keys[2 * layer : 2 * layer + 2]
    parts = torch.stack((k, v)).flatten(2).split(portion(pool) * pool.view.num_layers, 1)
    lanes = _joined([_keyed_sums(pool, part, table) for part in parts]).sum(0)  # [n, 2]
    return lanes[:, 0] + pool.keys.start_a[layer], lanes[:, 1]


def lanes_of_slots(pool: PoolState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a [layers, n] and lane b [n] of the bytes that lie in the pool now."""
    parts = slots.split(portion(pool))
    return _started(pool, _joined([_keyed_sums(pool, pool.rows.gather(part), pool.keys.pieces) for part in parts]))


def lane_a_of_slots(pool: PoolState, slots: Tensor) -> Tensor:
    """[layers, n]: lane a alone."""
    table, parts = pool.keys.pieces[:, :, : pool.piece_weights.shape[0]], slots.split(portion(pool))
    lanes = _joined([_keyed_sums(pool, pool.rows.gather(part), table) for part in parts])
    return lanes[:, :, 0].add_(pool.keys.start_a[:, None])


def portion(pool: PoolState) -> int:
    """Slots whose rows are taken at a time."""
    return max(8, PORTION_BYTES // (8 * pool.view.num_layers * pool.keys.words_per_row))


def _started(pool: PoolState, lanes: Tensor) -> tuple[Tensor, Tensor]:
    """Both lanes from their sums [layers, n, 2]."""
    lane_a, lane_b = lanes.unbind(2)
    return lane_a + pool.keys.start_a[:, None], lane_b.sum(0).add_(signed(pool.keys.start_b))


def _joined(sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)


def _keyed_sums(pool: PoolState, rows: Tensor, table: Tensor) -> Tensor:
    """[batch, n, lanes] mod 2^64, without starts, of rows [batch, n, row] and keys [batch, words, lanes * pieces].

    Words times key pieces are exact in float64 (Keys.pieces), and int64 sums of the pieces wrap as they should.
    """
    weights = pool.piece_weights
    sums = torch.bmm(rows.view(torch.uint32).to(torch.float64), table).to(torch.int64).view(-1, weights.shape[0])
    lanes = sums @ weights if sums.is_cpu else (sums * weights).sum(1)  # CUDA has no int64 matmul
    return lanes.view(rows.shape[0], rows.shape[1], -1)
