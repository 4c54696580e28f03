"""Staging: values on their way into a pool, kept until they are fingerprinted, several steps at once.

A CPU pays for a fingerprint by the operation, hardly by the byte. So values are copied into one buffer while they are
in the cache, and their lanes are taken before anything compares them. They are what was to be stored, not what the
pool holds now.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from kvcanary.forward import Forward
from kvcanary.lanes import joined, lanes_of_layer, lanes_of_rows
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels.record import signed

CAPACITY = 1024  # entries
LONG_FORWARD = 256  # entries; longer forwards are fingerprinted layer by layer
REMEMBERED_ROOMS = 256


class Stage:
    """The values of one pool that wait.

    parts:  K, V and extras, each [layers, CAPACITY, words] int32, in logical order whatever the pool's layout
    places: by slot, the place in `parts` that holds what was last stored there
    """

    def __init__(self, state: CanaryState, pool: PoolState) -> None:
        self._state, self.pool = state, pool
        with torch.inference_mode(False):
            shapes = [(pool.view.num_layers, CAPACITY, piece.words) for piece in pool.rows.pieces]
            self._parts = [torch.zeros(shape, dtype=torch.int32, device=pool.records.device) for shape in shapes]
        self._used = 0
        self._places: dict[int, int] = {}
        self._rooms: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}

    def fits(self, n: int) -> bool:
        return n > LONG_FORWARD or self._used + n <= CAPACITY

    def open(self, forward: Forward) -> None:
        """Room for a forward's values: by layer where its values are to be copied; none for a long forward."""
        n = len(forward.write_slots)
        if n <= LONG_FORWARD:
            forward.room = self._room(self._used, n)
            forward.stage_row = self._used
            self._used += n

    def _room(self, first: int, n: int) -> list[tuple[Tensor, ...]]:
        room = self._rooms.get((first, n))
        if room is None:
            pairs = zip(self.pool.view.parts, self._parts, strict=True)
            views = [
                words[:, first : first + n].view(part.dtype).view(len(words), n, *part.shape) for part, words in pairs
            ]
            room = list(zip(*(view.unbind(0) for view in views), strict=True))
            if len(self._rooms) < REMEMBERED_ROOMS:
                self._rooms[first, n] = room
        return room

    def store(self, forward: Forward, layer: int, *values: Tensor) -> None:
        """What a layer stores: `pool.view.value_shapes(n)`, K, V and extras in logical order."""
        if forward.room:
            room = forward.room[layer]
            if len(room) == 2:  # K and V, faster than the loop
                room[0].copy_(values[0])
                room[1].copy_(values[1])
            else:
                for part, value in zip(room, values, strict=True):
                    part.copy_(value)
        else:
            forward.lanes[layer] = lanes_of_layer(self.pool, layer, _words(self.pool, values))

    def keep(self, forward: Forward) -> None:
        """The records of this forward are sealed: its values wait, or the lanes taken at the stores are written.

        What a layer did not store is taken as it lies in the pool: R12 names it, R9 need not.
        """
        if forward.stored != self.pool.full_layers:
            for layer in range(self.pool.view.num_layers):
                if not forward.stored >> layer & 1:
                    self._take_from_pool(forward, layer)
        if forward.room:
            rows = range(forward.stage_row, forward.stage_row + len(forward.write_slots))
            self._places.update(zip(forward.write_slots, rows, strict=True))
        else:
            self._write_lanes(forward)

    def move(self, src: Sequence[int], dst: Sequence[int]) -> bool:
        """Bytes were moved, sources read first; whether all of them were waiting here. Else nothing changes."""
        if not all(slot in self._places for slot in src):
            return False
        self._places.update(zip(dst, [self._places[slot] for slot in src], strict=True))
        return True

    def forget(self, slots: Sequence[int]) -> None:
        """What these slots hold now did not pass through here."""
        for slot in slots:
            self._places.pop(slot, None)

    def values(self, slots: Sequence[int]) -> Tensor:
        """[layers, n, words_per_row] int32: the values of slots that wait, as they must lie in the pool."""
        places = self._state.ints(self._places[slot] for slot in slots)
        return joined([part.index_select(1, places) for part in self._parts], 2)

    def fingerprint(self) -> None:
        """Write the lanes of everything that waits; its records must be sealed."""
        if self._places:
            slots = list(self._places)
            self.pool.write_lanes(self._state.ints(slots), *lanes_of_rows(self.pool, self.values(slots)))
        self._places.clear()
        self._used = 0

    def _take_from_pool(self, forward: Forward, layer: int) -> None:
        rows = self.pool.rows.gather_layer(layer, forward.pool_slots)
        if not forward.room:
            forward.lanes[layer] = lanes_of_layer(self.pool, layer, rows)
            return
        places = slice(forward.stage_row, forward.stage_row + len(rows))
        for part, words in zip(self._parts, rows.split([part.shape[2] for part in self._parts], 1), strict=True):
            part[layer, places] = words

    def _write_lanes(self, forward: Forward) -> None:
        lanes = [forward.lanes[layer] for layer in range(self.pool.view.num_layers)]
        lane_a = torch.stack([a for a, _ in lanes])
        lane_b = torch.stack([b for _, b in lanes]).sum(0).add_(signed(self.pool.keys.start_b))
        last = dict(zip(forward.write_slots, range(len(forward.write_slots)), strict=True))  # W4 may repeat a slot
        for slot in last:
            self._places.pop(slot, None)
        entries = self._state.ints(last.values())
        self.pool.write_lanes(self._state.ints(last), lane_a.index_select(1, entries), lane_b.index_select(0, entries))


def _words(pool: PoolState, values: Sequence[Tensor]) -> Tensor:
    """[n, words_per_row] int32: the rows that these values are in the pool, in fresh memory."""
    typed = [value.to(part.dtype).reshape(len(value), -1) for part, value in zip(pool.view.parts, values, strict=True)]
    return joined(
        [torch.cat(list(same), 1).view(torch.int32) for _, same in groupby(typed, lambda part: part.dtype)], 1
    )
