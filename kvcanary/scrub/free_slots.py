"""Poison in watched pools, where the engine tells of grants and frees: what was given back is filled with a pattern of
its own, and looked at when it is granted again.

It writes into the pools of somebody else, so it is there only where everything is to be looked at: with content `full`.
All of it is launched on the stream of the next forward, behind whoever still reads the slots, rows that went among
them, and before it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary.calls.coverage import Coverage
from kvcanary.records.dispatch import ops_for
from kvcanary.scrub.poison import BUDGETS
from kvcanary_kernels.record.rows import WORD_BYTES, PoolRows

NOWHERE = -1  # a slot that is left alone
UNPOISONED = "freed slots that were not poisoned"


class Looked(NamedTuple):
    """Slots of one pool that were granted: which, [n, 2] bitmaps of layers that are not as they were filled, and to
    whom, [n] uids.
    """

    pool: int
    slots: Tensor
    mismatch: Tensor
    uids: Tensor


class FreeSlots:
    """P1 of pools that share slots: bytes of a free slot that somebody has written.

    filled: [num_slots] bool, which hold the pattern;  group: the number of those that share them
    """

    def __init__(
        self,
        pools: Sequence[PoolRows],
        device: torch.device,
        group: int,
        on_filled: Callable[[Tensor], object],
    ) -> None:
        """on_filled: is given slots [n] whose bytes are those of no record from now on"""
        self.group, self._pools, self._ops, self._on_filled = group, pools, ops_for(device), on_filled
        self.filled = torch.zeros(pools[0].num_slots, dtype=torch.bool, device=device)
        slot_bytes = sum(rows.num_layers * rows.words_per_row * WORD_BYTES for rows in pools)
        self.most = max(1, BUDGETS.get(device.type, BUDGETS["cuda"]) // slot_bytes)  # slots that a step fills
        self._told: list[tuple[Tensor, Tensor | None]] = []

    def freed(self, slots: Tensor) -> None:
        """Slots [n] int64 are nobody's."""
        self._told.append((slots, None))

    def granted(self, slots: Tensor, uids: Tensor) -> None:
        """Slots [n] int64 are these rows' [n]."""
        self._told.append((slots, uids))

    @property
    def is_told(self) -> bool:
        """Whether something waits for the next forward."""
        return bool(self._told)

    def forget(self) -> None:
        """Nobody answers for the bytes any more."""
        self._told = []
        self.filled.zero_()

    def apply(self, coverage: Coverage) -> Iterator[Looked]:
        """Fill and look, in the order in which it was told, for the step that is next. No wait."""
        told, self._told, left = self._told, [], self.most
        for slots, uids in told:
            if uids is None:
                self._fill(slots[:left])
                self.filled.index_fill_(0, slots[left:], False)
                coverage.skip(UNPOISONED, max(0, len(slots) - left))
                left = max(0, left - len(slots))
            else:
                yield from self._look(slots, uids)

    def _fill(self, slots: Tensor) -> None:
        for rows in self._pools:
            self._ops.poison_fill(rows, slots)
        self.filled.index_fill_(0, slots, True)
        self._on_filled(slots)

    def _look(self, slots: Tensor, uids: Tensor) -> Iterator[Looked]:
        """At those of these slots that were filled."""
        poisoned = torch.where(self.filled[slots], slots, NOWHERE)
        self.filled.index_fill_(0, slots, False)
        for pool, rows in enumerate(self._pools):
            mismatch = slots.new_zeros(len(slots), 2)
            self._ops.poison_check(rows, poisoned, mismatch=mismatch)
            yield Looked(pool, slots, mismatch, uids)
