"""Owners of slots, on the device: what an engine tells of grants, shared prefixes and frees, where it tells of them.

What is told waits for the next forward and is done on its stream, in the order in which it was told: a forward on its
way still reads what the engine has given to others meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcanary_kernels.watch.walk import EVERYBODYS, GIVEN_BACK, NOBODYS

SHARED, FREE, RETURNED = EVERYBODYS.value, NOBODYS.value, GIVEN_BACK.value


class Owners:
    """By slot, the uid of the row that was granted it, or that everybody may read it, or that it is free.

    slots:    [num_slots] int64
    on_freed: is given what was freed, [n] int64 slots;  on_granted: the same of grants, with the uids of their rows
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.slots = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._told: list[tuple[Tensor | int, Tensor | int]] = []
        self.on_freed: Callable[[Tensor], object] | None = None
        self.on_granted: Callable[[Tensor, Tensor], object] | None = None

    def granted(self, slots: Tensor, uids: Tensor) -> None:
        """Slots [n] int64 are these rows' [n]."""
        self._told.append((slots, uids))

    def shared(self, slots: Tensor) -> None:
        """A prefix cache holds these slots [n], but for those that were given back and not granted since."""
        self._told.append((slots, SHARED))

    def freed(self, slots: Tensor) -> None:
        """Slots [n] were given back."""
        self._told.append((slots, RETURNED))

    def left(self, uid: int) -> None:
        """A row is gone: what it had and nobody has freed is a prefix cache's."""
        self._told.append((uid, SHARED))

    def forget(self) -> None:
        """All slots are free, whatever was told."""
        self._told = []
        self.slots.zero_()

    def apply(self) -> None:
        """Do what was told; on the stream of the forward that is next."""
        told, self._told = self._told, []
        for which, owner in told:
            if isinstance(which, int):
                self.slots.masked_fill_(self.slots == which, owner)
            elif not isinstance(owner, int):
                self.slots.index_copy_(0, which, owner)
                if self.on_granted is not None:
                    self.on_granted(which, owner)
            elif owner == SHARED:
                held = self.slots[which]
                self.slots.index_copy_(0, which, held.masked_fill_(held != RETURNED, SHARED))
            else:
                self.slots.index_fill_(0, which, owner)
                if self.on_freed is not None:
                    self.on_freed(which)
