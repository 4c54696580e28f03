"""Slot map: where the token of a slot of the full pool lies in another pool, whose slot ids are its own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvcanary import NOWHERE, PoolView
from spec_engine.memory.pools.pool import KVPool


class Mapped(Protocol):
    """Behind whose map a pool lies: requests, tables and plans name the slots of ``slot_map``, the pool has others.

    window: tokens that its layers see, None: all; num_own_pages: of the pool
    """

    slot_map: Tensor

    @property
    def window(self) -> int | None: ...
    @property
    def num_own_pages(self) -> int: ...

    def translate(self, full_slots: Tensor) -> Tensor:
        """The pool's own slots of these, 0 where there is none."""

    def view(self, pool: KVPool) -> PoolView:
        """The pool as the canary sees it."""


class SlotMap:
    """``slots [num_slots] int64`` on the pools' device: 0, a null slot, where the token lies nowhere.

    One entry more lies behind them and says -1, so that -1, no slot, is translated to itself.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._map = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._map[-1] = NOWHERE
        self.slots = self._map[:-1]

    def translate(self, full_slots: Tensor) -> Tensor:
        """Own slots of ``full_slots``, int64 of any shape on the map's device; may be captured in a graph."""
        return self._map[full_slots]

    def write(self, full_slots: Tensor, own_slots: Tensor | int) -> None:
        """From now on these slots lie there; both int64 ``[n]``, or one own slot for all."""
        device = self._map.device
        self._map[full_slots.to(device)] = own_slots.to(device) if isinstance(own_slots, Tensor) else own_slots
