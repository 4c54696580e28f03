"""Copies: K and V that several workers of one engine hold must be the same bits, whoever computed them (X2).

What is stored is summed up where it lies, one number a pool, which travels with the counter of findings.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.incident import pool_name
from kvcanary.adapters.observed.report import place_of, pool_state
from kvcanary.adapters.observed.state import Group, Layers
from kvcanary.calls.violation import Violation
from kvcanary.ranks.agreement import RanksDisagreeError
from kvcanary.ranks.copies import Place, by_share, is_held_by_several
from kvcanary.ranks.findings import violation_of
from kvcanary.ranks.levels import X2, Level, Levels, Rows, digest
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import MASK_32, STEP_SITE, read_record


class StoredCopies:
    """Of layers that several ranks hold, as their views say with `whole_heads`.

    is_armed: a step has stored the same bits on all ranks, and so must every other
    """

    def __init__(self, canary: PagedCanary, num_ranks: int) -> None:
        """Before the canary is prepared."""
        self._canary, self.is_armed = canary, False
        self._own: dict[str, tuple[Group, Layers]] = {}
        for group in canary.groups:
            for layers in group.layers:
                if layers.view.whole_heads and is_held_by_several(layers.view, num_ranks):
                    self._own[f"copies of the {pool_name(canary, group, layers)} pool"] = group, layers
                    canary.launches.sum_stored(layers)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._own)

    def levels(self, step: int) -> Levels:
        """What was stored up to one of the last steps."""
        found, step = dict[str, Level](), self._canary.last_stored(step)
        for (name, (group, layers)), own in zip(self._own.items(), self._canary.sums_at(step), strict=True):
            level = Level(digest({"": [own]}), partial(self._rows, group, layers, step), X2)
            found |= by_share(name, layers.view, level)
        return found

    def were_alike(self, step: int) -> None:
        """Ranks have compared this step: they are armed, if anything was stored."""
        if not self.is_armed and any(self._canary.sums_at(self._canary.last_stored(step))):
            self.is_armed = True
            self._canary.fed |= {"X2"}

    def violation_of(self, error: RanksDisagreeError, pool: PoolState) -> Violation:
        """What an agreement has found, with its entry where it lies in one; pool: where it does not."""
        own = next((own for name, own in self._own.items() if error.level.startswith(name)), None)
        if own is None or error.name is None or error.position is None:
            return violation_of(error, pool)
        (group, layers), layer = own, int(error.name.rpartition(" ")[2])
        slots = self._slots(group, layers, self._canary.last_stored(error.step))
        if error.position >= len(slots):  # another rank has stored more
            return violation_of(error, pool)
        slot = int(slots[error.position])
        violation = violation_of(error, pool, Place(pool_state(self._canary, *own), layer, slot))
        record = read_record(group.records, slot)
        violation.position, violation.request_id = record.position, self._canary.writers.get(record.request)
        violation.notes += (place_of(group, slot, [layers.names[layer]]),)
        return violation

    def _rows(self, group: Group, layers: Layers, step: int) -> Rows:
        """By layer, fingerprints of what the step stored."""
        stored = layers.fingerprints[0][:, self._slots(group, layers, step)]
        return {f"layer {layer}": row for layer, row in enumerate(stored.tolist())}

    def _slots(self, group: Group, layers: Layers, step: int) -> Tensor:
        """[n] that were stored into since the step before, in their order; null slots are padding's."""
        stored = step - 1 if layers.is_late else step  # late layers are stored behind the sum of their step
        is_own = group.records[:, STEP_SITE] & MASK_32 == stored & MASK_32
        is_own[: group.null_slots] = False
        return torch.nonzero(is_own)[:, 0]
