"""Content checks: are the bytes of slots still those that were written?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.hits import Hit
from kvcanary.lanes import lane_a_of_slots, lanes_of_slots
from kvcanary.state import PoolState
from kvcanary_kernels.record import CONTENT_B


@dataclass(frozen=True, slots=True)
class Looked:
    """One slot whose bytes are looked at: whose it is, and the step in which it was last known good."""

    slot: int
    position: int | None
    request_id: str | None
    last_good: int | None


def find_changed(
    pool: PoolState,
    slots: Tensor,
    places_of: Callable[[], Sequence[Looked]],
    site: tuple[str, int],
    step: int,
    both_lanes: bool,
) -> list[Hit]:
    """R9 for every slot whose bytes changed; R3 where only the canary's fingerprint of them did.

    `places_of` describes the slots in order, and is asked only when one fired. Null slots hold padding and are never
    compared.
    """
    lane_a, lane_b = lanes_of_slots(pool, slots)
    differs_a = (lane_a != pool.content_a.index_select(1, slots)).T  # [n, layers]
    differs_b = lane_b != pool.records[:, CONTENT_B].index_select(0, slots)
    fired = differs_a.any(1) | differs_b if both_lanes else differs_a.any(1)
    numbers = fired.nonzero().flatten().tolist()
    if not numbers:
        return []
    hits, places = [], places_of()
    for number in numbers:
        place, layers = places[number], tuple(differs_a[number].nonzero().flatten().tolist())
        if place.slot < pool.view.null_slots:
            continue
        bytes_changed = bool(layers) and bool(differs_b[number])
        hits.append(
            Hit(
                "R9" if bytes_changed else "R3",
                pool,
                place.slot,
                place.position,
                place.request_id,
                site,
                step,
                layers=layers,
                last_good=place.last_good,
                fingerprint_hit=not bytes_changed,
            )
        )
    return hits


def slots_are_right(pool: PoolState, slots: Tensor) -> bool:
    """Lane a of all layers of these slots, at once."""
    return slots.numel() == 0 or torch.equal(lane_a_of_slots(pool, slots), pool.content_a.index_select(1, slots))
