"""Poisoning: freed pages are filled with a pattern of their own, under a byte budget, and looked at before reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import filterfalse, islice

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.forward import Ints, on_host
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.pools.slot_maps import slots_of_pages
from kvcanary.records.dispatch import ops_for
from kvcanary.records.mailbox import to_device
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.rereads import Rereads
from kvcanary.scrub.unwritten_tails import UnwrittenTails
from kvcanary_kernels.content.check import mismatched_layers

#: Bytes a step that are poisoned, by the kind of device: a CPU pays for the pattern, a GPU for the bandwidth alone.
BUDGETS = {"cpu": 16 << 10, "cuda": 4 << 20}
BATCH_SLOTS = 64  # that are worth a launch


class Poisoner:
    """P1: bytes of a free page that somebody has written. NaN instead of the pattern is a debug mode.

    waiting: freed pages, oldest first;  poisoned: those that were filled
    credit:  bytes that were saved of the budgets of steps while pages waited
    """

    def __init__(
        self,
        state: CanaryState,
        pools: Sequence[PoolState],
        pattern: str,
        coverage: Coverage,
        rereads: Rereads,
        tails: UnwrittenTails,
    ) -> None:
        """`pools`: of one group, whose free pages are told of; `pattern`: finite, nan or off.

        `tails`: looks at granted pages for which no poison vouches
        """
        self._state, self._coverage, self._rereads, self._tails = state, coverage, rereads, tails
        self._is_off, self._nan = pattern == "off", pattern == "nan"
        self._pools = pools
        self._slot_bytes = sum(pool.view.slot_bytes for pool in self._pools)
        self.budget = BUDGETS.get(state.records.device.type, BUDGETS["cuda"])
        self._ops = ops_for(state.records.device)
        self.credit = 0
        self.waiting: dict[int, None] = {}
        self.poisoned: set[int] = set()

    def prepare(self) -> None:
        """As `StepChecks.prepare`, over a slot outside of every pool, which is nobody's."""
        if self._is_off or not self._state.records.is_cuda:
            return
        nowhere = self._state.records.new_full((1,), -1)
        for pool in self._pools:
            self._ops.poison_fill(pool.rows, nowhere, nan=self._nan)
            self._ops.poison_check(pool.rows, nowhere, mismatch=nowhere.new_zeros(1, 2), nan=self._nan)

    def freed(self, pages: Sequence[int], is_damaged: bool = False) -> None:
        """These pages belong to nobody; `tick` will fill them.

        `is_damaged`: at once, whatever the budget, or zero them where nothing is poisoned: NaN that was computed from
        damage must not meet their next owner, who reads whole pages
        """
        if not self._pools or self._pools[0].is_gone:
            return
        if not self._is_off:
            self.waiting.update(dict.fromkeys(pages))
        if is_damaged:
            (self._zero if self._is_off else self.fill)(pages)

    def forget(self) -> None:
        """The pools were cleared: no page is poisoned, and none waits."""
        self.waiting.clear()
        self.poisoned.clear()
        self.credit = 0

    def tick(self) -> None:
        """A step has passed: fill what its budget, and what was saved of it, allow."""
        if not self.waiting:
            self.credit = 0
            return
        self.credit += self.budget
        page_bytes = self._state.page_size * self._slot_bytes
        count = min(self.credit // page_bytes, len(self.waiting))
        if count * self._state.page_size >= BATCH_SLOTS or count == len(self.waiting):
            self.credit -= count * page_bytes
            self.fill(list(islice(self.waiting, count)))

    def granted(
        self, pages: Sequence[int], step: int, full_pages: Sequence[int] | None = None
    ) -> list[Violation | ViolationBatch]:
        """P1 for every slot of these pages whose poison is damaged; they have an owner from now on.

        What fires at once; on a GPU the host collects it with the step.

        `full_pages`: those of the full group that a slot map sends there; None: the pages are these themselves
        """
        poisoned = [*filter(self.poisoned.__contains__, pages)]
        unknown = [*filterfalse(self.poisoned.__contains__, pages)] if poisoned else pages
        full = None if full_pages is None else dict(zip(pages, full_pages, strict=True))
        self._tails.granted(self._pools, unknown, self._names(unknown, full))
        if self._is_off or not (self.waiting or poisoned):
            return []
        waiting = [*filter(self.waiting.__contains__, unknown)]
        for page in waiting:
            del self.waiting[page]
        self._coverage.skip("freed pages reused before they were poisoned", len(waiting))
        if not poisoned:
            return []
        self.poisoned.difference_update(poisoned)
        names, size = self._names(poisoned, full), self._state.page_size
        first = np.array(poisoned, np.int64) if names is None else names[::size] // size
        self._tails.found_finite(first, step)  # poison is, or is zeroed now
        violations = [violation for pool in self._pools for violation in self._check(pool, poisoned, step, names)]
        if self._nan:
            self._zero(poisoned)
        return violations

    def fill(self, pages: Sequence[int]) -> None:
        """Poison pages that wait."""
        for page in pages:
            del self.waiting[page]
        self.poisoned.update(pages)
        slots = self._slots(pages)
        for pool in self._pools:
            if pool.host is None:
                self._ops.poison_fill(pool.rows, slots, nan=self._nan)
            else:
                pool.loops.poison(pool.struct_at, slots.numpy(), self._nan, True)

    def _check(
        self, pool: PoolState, pages: Sequence[int], step: int, names: Ints | None
    ) -> Sequence[Violation | ViolationBatch]:
        slots = self._slots(pages)
        if pool.host is not None and pool.loops.poison(pool.struct_at, slots.numpy(), self._nan, False):
            return []
        mismatch = self._rereads.room(2 * len(slots)).view(-1, 2)
        self._ops.poison_check(pool.rows, slots, mismatch=mismatch, nan=self._nan)
        return self._rereads.ask(mismatch, partial(self._damaged, pool, slots, mismatch, step, names))

    def _damaged(
        self, pool: PoolState, slots: Tensor, mismatch: Tensor, step: int, names: Ints | None
    ) -> list[ViolationBatch]:
        damaged = np.flatnonzero(mismatch.any(1))
        layers = mismatched_layers(mismatch[damaged], pool.view.num_layers).T.numpy()
        nobody = np.full(len(damaged), -1)
        named = None if names is None else names[damaged]
        where = on_host(slots)[damaged]
        self._tails.found_otherwise(where if named is None else named)
        return [ViolationBatch("P1", pool, ("grant", 0), step, where, nobody, nobody, (), layers=layers, names=named)]

    def _names(self, pages: Sequence[int], full: Mapping[int, int] | None) -> Ints | None:
        """What plans call the slots of these pages, where that is not what the pools call them."""
        return None if full is None else slots_of_pages([full[page] for page in pages], self._state.page_size)

    def _zero(self, pages: Sequence[int]) -> None:
        """NaN must not be read from the part of a page that is not written yet."""
        slots = self._slots(pages)
        for pool in self._pools:
            words = torch.zeros(len(slots), pool.rows.words_per_row, dtype=torch.int32, device=slots.device)
            for layer in range(pool.view.num_layers):
                pool.rows.scatter_layer(layer, slots, words)

    def _slots(self, pages: Sequence[int]) -> Tensor:
        slots = slots_of_pages(pages, self._state.page_size)
        return to_device(torch.from_numpy(slots), self._state.records.device)
