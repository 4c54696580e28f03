"""Owners of slots, on the device: what an engine tells of grants, shared prefixes and frees, where it tells of them.

What is told waits for the next forward and is done on its stream, in the order in which it was told: a forward on its
way still reads what the engine has given to others meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.watch.walk import EVERYBODYS, NOBODYS

SHARED, FREE = EVERYBODYS.value, NOBODYS.value


class Owners:
    """By slot, the uid of the row that was granted it, or that everybody may read it, or that it is free.

    slots: [num_slots] int64
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.slots = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._told: list[tuple[Tensor | int, Tensor | int]] = []

    def granted(self, slots: Tensor, uids: Tensor) -> None:
        """Slots [n] int64 are these rows' [n]."""
        self._told.append((slots, uids))

    def shared(self, slots: Tensor) -> None:
        """A prefix cache holds these slots [n]."""
        self._told.append((slots, SHARED))

    def freed(self, slots: Tensor) -> None:
        """Slots [n] are nobody's."""
        self._told.append((slots, FREE))

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
            elif isinstance(owner, int):
                self.slots.index_fill_(0, which, owner)
            else:
                self.slots.index_copy_(0, which, owner)
