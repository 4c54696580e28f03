"""Poison in watched pools, where the engine tells of grants and frees: what was given back is filled with a pattern of
its own, and looked at when it is granted again.

It writes into the pools of somebody else, so it is there only where everything is to be looked at: with content `full`.
All of it is launched on the stream of the next forward, behind whoever still reads the slots, rows that went among
them, and before it stores.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcanary.adapters.observed.state import Event, Group
from kvcanary.records.dispatch import ops_for
from kvcanary.scrub.poison import BUDGETS

if TYPE_CHECKING:
    from kvcanary.adapters.observed.canary import PagedCanary

NOWHERE = -1  # a slot that is left alone
GRANTED = "a grant of slots that were filled when they were free"
UNPOISONED = "freed slots that were not poisoned"


class Poison:
    """P1 of one group: bytes of a free slot that somebody has written.

    filled: [num_slots] bool, which hold the pattern
    """

    def __init__(self, canary: PagedCanary, group: Group) -> None:
        self._canary, self._group = canary, group
        device = group.records.device
        self.filled = torch.zeros(len(group.records), dtype=torch.bool, device=device)
        budget = BUDGETS.get(device.type, BUDGETS["cuda"])
        self._most = max(1, budget // sum(layers.entry_bytes for layers in group.layers))
        self._ops = ops_for(device)
        self._told: list[tuple[Tensor, Tensor | None]] = []

    def freed(self, slots: Tensor) -> None:
        """Slots [n] int64 are nobody's."""
        self._told.append((slots, None))

    def granted(self, slots: Tensor, uids: Tensor) -> None:
        """Slots [n] int64 are these rows' [n]."""
        self._told.append((slots, uids))

    def apply(self, events: list[Any]) -> None:
        """Fill and look, in the order in which it was told; `events`: of the step that is next. No wait."""
        told, self._told, left = self._told, [], self._most
        for slots, uids in told:
            if uids is None:
                left = self._fill(slots, left)
            else:
                self._look(slots, uids, events)

    def _fill(self, slots: Tensor, left: int) -> int:
        """What the budget of this step allows; gives what is left of it."""
        own = slots[:left]
        self._canary.coverage.skip(UNPOISONED, len(slots) - len(own))
        self.filled.index_fill_(0, slots, False)
        for layers in self._group.layers:
            self._ops.poison_fill(layers.rows, own)
        self.filled.index_fill_(0, own, True)
        return left - len(own)

    def _look(self, slots: Tensor, uids: Tensor, events: list[Any]) -> None:
        """At those of these slots that were filled."""
        poisoned = torch.where(self.filled[slots], slots, NOWHERE)
        self.filled.index_fill_(0, slots, False)
        for layers in self._group.layers:
            mismatch = slots.new_zeros(len(slots), 2)
            self._ops.poison_check(layers.rows, poisoned, mismatch=mismatch)
            self._canary.memory.total += (mismatch != 0).any(1).sum()
            row_of = functools.partial(_owner, self._canary.writers, uids)
            event = Event("P1", GRANTED, layers, slots, mismatch, self._group, {}, by_record=False, row_of=row_of)
            event.site = "grant"
            events.append(event)

    def forget(self) -> None:
        """Nobody answers for the bytes any more."""
        self._told = []
        self.filled.zero_()


def _owner(writers: Mapping[int, str], uids: Tensor, entry: int, slot: int) -> str | None:
    """Who has been granted a slot that was written before."""
    return writers.get(int(uids[entry]))
