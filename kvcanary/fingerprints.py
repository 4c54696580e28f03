"""Fingerprints of what was stored: taken from the values on their way into the pool, once an entry is final.

Until then a forward keeps its values. With content=full every entry is fingerprinted at once; otherwise entries that
never become final (draft nodes, rejected nodes, junk beyond the accepted length) are never read by a content check,
and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.forward import Forward
from kvcanary.lanes import lanes_of_layer, lanes_of_values
from kvcanary.ledger import Ledger, Request
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels import record
from kvcanary_kernels.record import signed


@dataclass(slots=True, eq=False)
class Held:
    """A forward whose entries are not all final yet; `places` says which entry lies in a slot now."""

    forward: Forward
    places: dict[int, int]


class Fingerprints:
    """Holds what was stored until it is final, and writes its lanes before anything compares them."""

    def __init__(self, state: CanaryState, ledger: Ledger) -> None:
        self._state, self._ledger = state, ledger
        self._held: list[Held] = []
        self._final: list[Held] = []

    def hold(self, forward: Forward, writer: dict[int, int], first: int) -> None:
        """Keep the values of a forward whose entries `writer` names by row, counted from `first`."""
        base, slots = forward.pool.base, forward.write_slots
        places = dict(zip(slots, range(len(slots)), strict=True))
        if any(writer.get(base + slot) != first + entry for slot, entry in places.items()):
            places = {slot: entry for slot, entry in places.items() if writer.get(base + slot) == first + entry}
        self._held.append(Held(forward, places))

    def move(self, pool: PoolState, src: Sequence[int], dst: Sequence[int]) -> None:
        """Bytes were moved; every source was read before any destination was written."""
        for held in self._held:
            if held.forward.pool is pool:
                moved = [held.places.get(slot) for slot in src]
                for slot, entry in zip(dst, moved, strict=True):
                    if entry is None:
                        held.places.pop(slot, None)
                    else:
                        held.places[slot] = entry

    def waits_for(self, pool: PoolState, slots: Iterable[int]) -> bool:
        """Whether a slot among these is final, but not fingerprinted yet."""
        waiting = [held.places for held in self._final if held.forward.pool is pool]
        return bool(waiting) and any(slot in places for slot in slots for places in waiting)

    def decide(self, step: int) -> None:
        """Forwards of earlier steps are decided: keep what is final of them, and let go of the rest."""
        undecided = []
        for held in self._held:
            if held.forward.step >= step:
                undecided.append(held)
            else:
                held.places = self._final_places(held, None)
                if held.places:
                    self._final.append(held)
        self._held = undecided

    def write(self) -> None:
        """Fingerprint everything that is final."""
        final, self._final = self._final, []
        self._write(final)

    def write_all(self) -> None:
        """Fingerprint everything that is held, final or not."""
        self._final += self._held
        self._held = []
        self.write()

    def write_of(self, request: Request) -> None:
        """Fingerprint what is final of one request, which ends; and all that waits."""
        self._final += [Held(held.forward, self._final_places(held, request)) for held in self._held]
        self.write()

    def drop(self, request: Request) -> None:
        """The request gives its pages back: nothing of it is compared any more."""
        for held in (*self._held, *self._final):
            if request in held.forward.requests:
                owners = _owners(held.forward)
                held.places = {slot: entry for slot, entry in held.places.items() if owners[entry] is not request}

    def _final_places(self, held: Held, only: Request | None) -> dict[int, int]:
        """Slot and entry of what is final; of one request, or of all."""
        forward, final = held.forward, {}
        positions, size, owners = forward.write_positions, self._ledger.page_size, _owners(forward)
        lengths = {request.uid: request.final_len(forward.pool.pool_id) for request in forward.requests}
        for slot, entry in held.places.items():
            request, position = owners[entry], positions[entry]
            if (only is None or request is only) and position < lengths[request.uid]:
                page, offset = divmod(position, size)
                if page < len(request.pages) and request.pages[page] * size + offset == slot:
                    final[slot] = entry
        return final

    def _write(self, held: Sequence[Held]) -> None:
        for pool in self._state.pools:
            forwards: list[Forward] = []
            slots: list[int] = []
            entries: list[int] = []
            first = 0
            for one in held:
                if one.forward.pool is pool and one.places:
                    slots += one.places
                    entries += [first + entry for entry in one.places.values()]
                    forwards.append(one.forward)
                    first += len(one.forward.write_slots)
            if slots:
                self._write_lanes(pool, forwards, slots, entries)

    def _write_lanes(self, pool: PoolState, forwards: Sequence[Forward], slots: list[int], entries: list[int]) -> None:
        lane_a, lane_b = stored_lanes(pool, forwards, self._state.ints(entries))
        where = self._state.ints(slots)
        pool.content_a.index_copy_(1, where, lane_a)
        pool.records.select(1, record.CONTENT_B).index_copy_(0, where, lane_b)
        pool.expected.select(1, record.CONTENT_B).index_copy_(0, where, lane_b)


def stored_lanes(pool: PoolState, forwards: Sequence[Forward], entries: Tensor) -> tuple[Tensor, Tensor]:
    """Lane a [layers, n] and lane b [n] of these entries of all forwards, as they were stored."""
    if any(forward.lanes for forward in forwards):
        parts = [_eager_lanes(pool, forward) for forward in forwards]
        lane_a, lane_b = torch.cat([a for a, _ in parts], 1), torch.cat([b for _, b in parts])
        return lane_a.index_select(1, entries), lane_b.index_select(0, entries)
    values: list[Tensor] = []
    for layer in range(pool.view.num_layers):
        for forward in forwards:
            values.append(_stored(forward, layer, forward.k, pool.view.k))
        for forward in forwards:
            values.append(_stored(forward, layer, forward.v, pool.view.v))
    parts_of_layers = torch.cat(values).view(2 * pool.view.num_layers, -1, pool.row_numel)
    return lanes_of_values(pool, parts_of_layers.index_select(1, entries))


def _eager_lanes(pool: PoolState, forward: Forward) -> tuple[Tensor, Tensor]:
    lanes = []
    for layer in range(pool.view.num_layers):
        k = _stored(forward, layer, forward.k, pool.view.k)
        v = _stored(forward, layer, forward.v, pool.view.v)
        lanes.append(forward.lanes.get(layer) or lanes_of_layer(pool, layer, k, v))
    lane_b = torch.stack([b for _, b in lanes]).sum(0).add_(signed(pool.keys.start_b))
    return torch.stack([a for a, _ in lanes]), lane_b


def _stored(forward: Forward, layer: int, values: Sequence[Tensor | None], pool: Sequence[Tensor]) -> Tensor:
    """What a layer stored, or, where it stored nothing, what lies in its slots."""
    value = values[layer]
    return pool[layer].index_select(0, forward.slots) if value is None else value


def _owners(forward: Forward) -> list[Request]:
    """By entry of the write plan, the request whose row it is."""
    width, owners = forward.read.rows_per_request, []
    for row, written in enumerate(forward.written):
        owners += [forward.requests[row // width]] * written
    return owners
