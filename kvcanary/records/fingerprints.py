"""Content lanes of slots: by a compiled loop in host memory, by the kernel on a GPU; and of one layer's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcanary.pools.slot_maps import Ints
from kvcanary.records.state import PoolState
from kvcanary_kernels.content.fingerprint import fingerprint, join, keyed_sums
from kvcanary_kernels.record.layout import CONTENT_B, Keys


def lanes_of_slots(pool: PoolState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a [layers, n] and lane b [n] of the bytes that lie in the pool now."""
    lane_a, lane_b = slots.new_empty(pool.view.num_layers, len(slots)), slots.new_empty(len(slots))
    host = pool.host
    if host is None:
        fingerprint(pool.rows, slots, pool.keys, lane_a=lane_a, lane_b=lane_b)
    else:
        rows = host.address, host.layout, host.layer_keys[0], host.words, host.start_a
        pool.loops.sum_slots(*rows, host.start_b, slots.contiguous().numpy(), lane_a.numpy(), lane_b.numpy())
    return lane_a, lane_b


def numbers_are_right(pool: PoolState, slots: Ints, both_lanes: bool = False) -> bool:
    """`slots_are_right` of a pool in host memory."""
    return pool.loops.match_slots(pool.card_at, slots, both_lanes)


def slots_are_right(pool: PoolState, slots: Tensor, both_lanes: bool = False) -> bool:
    """Whether lane a of every layer is the one that is kept, for all of these slots; `both_lanes`: and lane b."""
    if pool.host is not None:
        return numbers_are_right(pool, slots.contiguous().numpy(), both_lanes)
    lane_a, lane_b = lanes_of_slots(pool, slots)
    is_right = torch.equal(lane_a, pool.content_a.index_select(1, slots))
    return is_right and (not both_lanes or torch.equal(lane_b, pool.records[:, CONTENT_B].index_select(0, slots)))


def lanes_of_layer(pool: PoolState, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a [n] of one layer's rows [n, words_per_row] int32, and what they add to lane b [n]."""
    return lanes_of_words(pool.keys, layer, rows)


def lanes_of_words(keys: Keys, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`lanes_of_layer` of rows that lie in no pool, with the keys of their layers."""
    lanes = keyed_sums(rows[None], keys.pieces[layer : layer + 1])[0].chunk(2, 1)
    lane_a, lane_b = (join(lane, keys) for lane in lanes)
    return lane_a + keys.start_a[layer], lane_b


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` that leaves a single dense part as it is."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim)
