"""Poison in watched pools, where the engine tells of grants and frees: what was given back is filled with a pattern of
its own, and looked at when it is granted again.

It writes into the pools of somebody else, so it is there only where everything is to be looked at: with content `full`.
All of it is launched on the stream of the next forward, behind whoever still reads the slots, and before it stores.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
        self._canary, self._group, self._nan = canary, group, canary.config.poison == "nan"
        device = group.records.device
        self.filled = torch.zeros(len(group.records), dtype=torch.bool, device=device)
        budget = BUDGETS.get(device.type, BUDGETS["cuda"])
        self._most = max(1, budget // sum(layers.entry_bytes for layers in group.layers))
        self._ops, self._step, self._left = ops_for(device), 0, self._most

    def freed(self, slots: Tensor) -> None:
        """Fill what the budget of this step allows; slots [n] int64."""
        if self._step != self._canary.step:
            self._step, self._left = self._canary.step, self._most
        own = slots[: self._left]
        self._left -= len(own)
        self._canary.coverage.skip(UNPOISONED, len(slots) - len(own))
        self.filled.index_fill_(0, slots, False)
        for layers in self._group.layers:
            self._ops.poison_fill(layers.rows, own, nan=self._nan)
        self.filled.index_fill_(0, own, True)

    def granted(self, slots: Tensor, uids: Tensor) -> None:
        """Look at those of these slots [n] that were filled; they are rows' [n] now. No wait."""
        poisoned = torch.where(self.filled[slots], slots, NOWHERE)
        self.filled.index_fill_(0, slots, False)
        for layers in self._group.layers:
            mismatch = slots.new_zeros(len(slots), 2)
            self._ops.poison_check(layers.rows, poisoned, mismatch=mismatch, nan=self._nan)
            self._canary.memory.total += (mismatch != 0).any(1).sum()
            if self._nan:  # whoever reads whole pages would meet it
                zeros = mismatch.new_zeros(len(slots), layers.rows.words_per_row, dtype=torch.int32)
                for layer in range(layers.rows.num_layers):
                    layers.rows.scatter_layer(layer, poisoned.clamp(min=0), zeros)
            row_of = functools.partial(_owner, self._canary.writers, uids)
            self._canary.events.append(
                Event(
                    "P1",
                    GRANTED,
                    layers,
                    slots,
                    mismatch,
                    self._group,
                    {},
                    by_record=False,
                    row_of=row_of,
                    site="grant",
                )
            )

    def forget(self) -> None:
        self.filled.zero_()


def _owner(writers: Mapping[int, str], uids: Tensor, entry: int, slot: int) -> str | None:
    """Who has been granted a slot that was written before."""
    return writers.get(int(uids[entry]))
