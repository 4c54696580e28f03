"""Slot maps: pools whose slots are their own (a sliding window), reached through a map from the full group's slots.

Grants, pages and rows are those of the full group. A reader of a mapped pool checks the pool's record of
`to_pool_slots(view, granted slots)`, for the positions from `window_start` on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.pools.views import FULL_GROUP, PoolView

Ints = NDArray[np.int64]
NOWHERE = -1  # in a slot map, and in what is translated by one
SLOT_BYTES = 8  # of a slot id in an index array


def to_pool_slots(view: PoolView, full_slots: Tensor) -> Tensor:
    """[n] int64: where the tokens of these slots of the full group lie in this pool, -1 where nowhere.

    full_slots: [n] int64 on the pool's device, any values; those outside the full group lie nowhere. Without a map
    slots are the pool's own. May be captured: no copy to the host.
    """
    if view.slot_map is None:
        return full_slots
    size = view.slot_map.shape[0]
    found = view.slot_map.index_select(0, full_slots.clamp(0, size - 1))
    return torch.where((full_slots >= 0) & (full_slots < size), found, NOWHERE)


def slots_in(view: PoolView, full_slots: Ints) -> Ints:
    """`to_pool_slots` for slots that the host knows; -1 also where the map names no slot of the pool."""
    if view.slot_map is None:
        return full_slots
    slots, outside = locate_slots(view, torch.from_numpy(full_slots).to(view.device))
    return torch.where(outside, NOWHERE, slots).cpu().numpy()


def locate_slots(view: PoolView, full_slots: Tensor) -> tuple[Tensor, Tensor]:
    """[n] int64 and [n] bool: their slots in the pool, -1 where nowhere, and which of them may be used by nobody.

    Those are ids outside the full group, and entries of the map outside the pool. Nowhere alone is no such id.
    """
    slots = to_pool_slots(view, full_slots)
    if view.slot_map is None:
        return slots, (slots < 0) | (slots >= view.num_slots)
    foreign = (full_slots < 0) | (full_slots >= view.slot_map.shape[0])
    return slots, foreign | (slots >= view.num_slots) | ((slots < 0) & (slots != NOWHERE))


def slots_of_pages(pages: Sequence[int] | Ints, page_size: int) -> Ints:
    """[pages * page_size] int64: all slots of these pages, page by page."""
    return (np.array(pages, np.int64)[:, None] * page_size + np.arange(page_size)).ravel()


def window_start(view: PoolView, position: int) -> int:
    """First position that attention sees from this one."""
    return 0 if view.window is None else first_visible(position, view.window)


def final_len(committed_len: int, ahead: int, written: int) -> int:
    """Entries of a row that no rejection takes back, and that a forward has written which is no guess.

    ahead: entries that it holds beyond the committed length
    """
    return min(committed_len + ahead, written)


def first_visible(position: int, window: int) -> int:
    """The first position that a reader at ``position`` sees, itself included."""
    return max(0, position + 1 - window)


def check_groups(views: Sequence[PoolView]) -> None:
    """PlanError where the pools of a group differ in their map, or a map has not one entry a full slot."""
    full_slots = full_group_slots(views)
    for view in views:
        if view.slot_map is None:
            continue
        if view.slot_map.shape[0] != full_slots:
            raise PlanError(
                f"slot_map of pool {view.name!r} must have one entry a slot of the full group, "
                f"got {view.slot_map.shape[0]}: it has {full_slots}"
            )
        for other in views:
            if other.group == view.group and other.slot_map is not view.slot_map:
                raise PlanError(
                    f"pools {view.name!r} and {other.name!r} of group {view.group!r} must have one slot_map"
                )


def full_group_slots(views: Sequence[PoolView]) -> int:
    """Slots that plans may name: those of the pools without a map, or where all have one the entries of a map."""
    own = [view.num_slots for view in views if view.group == FULL_GROUP]
    return max(own or [view.num_slots if view.slot_map is None else view.slot_map.shape[0] for view in views])
