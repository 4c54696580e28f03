"""Staging: values on their way into a pool, kept until they are fingerprinted, several steps at once.

A CPU pays for a fingerprint by the operation, hardly by the byte. So values are copied into one buffer while they are
in the cache, and their lanes are taken before anything compares them. They are what was to be stored, not what the
pool holds now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcanary.forward import Forward
from kvcanary.lanes import lanes_of_layer, lanes_of_values
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels.record import CONTENT_B, signed

CAPACITY = 1024  # entries
LONG_FORWARD = 256  # entries; longer forwards are fingerprinted layer by layer
REMEMBERED_ROOMS = 256


class Stage:
    """The values of one pool that wait.

    values: [2 * layers, CAPACITY, row], K before V
    places: by slot, the row of `values` that holds what was last stored there
    """

    def __init__(self, state: CanaryState, pool: PoolState) -> None:
        self._state, self._pool = state, pool
        with torch.inference_mode(False):
            shape = 2 * pool.view.num_layers, CAPACITY, pool.row_numel
            self._values = torch.zeros(shape, dtype=pool.dtype, device=pool.records.device)
        self._used = 0
        self._places: dict[int, int] = {}
        self._rooms: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    def fits(self, n: int) -> bool:
        return n > LONG_FORWARD or self._used + n <= CAPACITY

    def open(self, forward: Forward) -> None:
        """Room for a forward's values: by layer where K and V are to be copied; none for a long forward."""
        n = len(forward.write_slots)
        if n <= LONG_FORWARD:
            forward.room = self._room(self._used, n)
            forward.stage_row = self._used
            self._used += n

    def _room(self, first: int, n: int) -> list[tuple[Tensor, Tensor]]:
        room = self._rooms.get((first, n))
        if room is None:
            view = self._pool.view
            rows = self._values[:, first : first + n].unflatten(2, (view.kv_heads, view.head_dim)).unbind(0)
            room = list(zip(rows[::2], rows[1::2], strict=True))
            if len(self._rooms) < REMEMBERED_ROOMS:
                self._rooms[first, n] = room
        return room

    def store(self, forward: Forward, layer: int, k: Tensor, v: Tensor) -> None:
        if forward.room:
            k_rows, v_rows = forward.room[layer]
            k_rows.copy_(k)
            v_rows.copy_(v)
        else:
            forward.lanes[layer] = lanes_of_layer(self._pool, layer, k.to(self._pool.dtype), v.to(self._pool.dtype))

    def keep(self, forward: Forward) -> None:
        """The records of this forward are sealed: its values wait, or the lanes taken at the stores are written.

        What a layer did not store is taken as it lies in the pool: R12 names it, R9 need not.
        """
        view = self._pool.view
        if forward.stored != self._pool.full_layers:
            for layer in range(view.num_layers):
                if not forward.stored >> layer & 1:
                    self.store(forward, layer, view.k[layer][forward.slots], view.v[layer][forward.slots])
        if forward.room:
            rows = range(forward.stage_row, forward.stage_row + len(forward.write_slots))
            self._places.update(zip(forward.write_slots, rows, strict=True))
        else:
            self._write_lanes(forward)

    def move(self, src: Sequence[int], dst: Sequence[int]) -> bool:
        """Bytes were moved, sources read first; whether all of them were waiting here."""
        moved = [self._places.get(slot) for slot in src]
        for slot, row in zip(dst, moved, strict=True):
            if row is None:
                self._places.pop(slot, None)
            else:
                self._places[slot] = row
        return None not in moved

    def fingerprint(self) -> None:
        """Write the lanes of everything that waits; its records must be sealed."""
        if self._places:
            rows = self._state.ints(self._places.values())
            values = self._values.index_select(1, rows)
            self._write(self._state.ints(self._places), *lanes_of_values(self._pool, values))
        self._places.clear()
        self._used = 0

    def _write_lanes(self, forward: Forward) -> None:
        lanes = [forward.lanes[layer] for layer in range(self._pool.view.num_layers)]
        lane_a = torch.stack([a for a, _ in lanes])
        lane_b = torch.stack([b for _, b in lanes]).sum(0).add_(signed(self._pool.keys.start_b))
        last = dict(zip(forward.write_slots, range(len(forward.write_slots)), strict=True))  # W4 may repeat a slot
        for slot in last:
            self._places.pop(slot, None)
        entries = self._state.ints(last.values())
        self._write(self._state.ints(last), lane_a.index_select(1, entries), lane_b.index_select(0, entries))

    def _write(self, slots: Tensor, lane_a: Tensor, lane_b: Tensor) -> None:
        pool = self._pool
        pool.content_a.index_copy_(1, slots, lane_a)
        pool.records.select(1, CONTENT_B).index_copy_(0, slots, lane_b)
        pool.expected.select(1, CONTENT_B).index_copy_(0, slots, lane_b)
