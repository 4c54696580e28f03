"""Groups: a pool with slots of its own is reached through the engine's slot map, which is checked."""

from __future__ import annotations

import pytest
import torch

from kvcanary import PlanError, PoolView
from kvcanary.pools.slot_maps import to_pool_slots, window_start
from kvcanary.records.state import CanaryState

FULL_SLOTS, OWN_SLOTS, PAGE_SIZE = 16, 12, 2


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def view_of(name: str, slots: int, **group: object) -> PoolView:
    return PoolView(name, [torch.zeros(slots, 1, 4)], [torch.zeros(slots, 1, 4)], PAGE_SIZE, **group)


def sliding(**entries: int) -> PoolView:
    """A pool whose map sends full slot i to i - 2 from slot 4 on, and the others nowhere; `f5=11` changes an entry."""
    slot_map = torch.where(torch.arange(FULL_SLOTS) < 4, -1, torch.arange(FULL_SLOTS) - 2)
    for name, slot in entries.items():
        slot_map[int(name[1:])] = slot
    slot_map.clamp_(-1000, 1000)
    return view_of("sliding", OWN_SLOTS, group="sliding", slot_map=slot_map, window=3)


def test_full_slots_are_translated():
    """Each granted slot of the full group has its slot in the pool, and what lies outside the group has none."""
    assert to_pool_slots(sliding(), ints(15, 4, 9, 0, -1, 16, 1 << 40)).tolist() == [13, 2, 7, -1, -1, -1, -1]
    assert to_pool_slots(sliding(), ints()).tolist() == []


def test_without_a_map_slots_are_the_pools_own():
    """A full pool, or a group whose plans name its own slots, needs no translation."""
    slots = ints(3, 1)
    assert to_pool_slots(view_of("target", 4), slots) is slots


def test_the_map_is_read_when_it_is_used():
    """The engine changes its map in place as windows slide; no copy of it is kept."""
    view = sliding()
    view.slot_map[9] = 3
    assert to_pool_slots(view, ints(9)).tolist() == [3]


@pytest.mark.parametrize(("position", "start"), [(0, 0), (2, 0), (3, 1), (10, 8)])
def test_a_window_counts_the_readers_own_token(position, start):
    """A window of 3 sees the token itself and two before it; without a window all are seen."""
    assert window_start(sliding(), position) == start
    assert window_start(view_of("target", 4), position) == 0


def refused(*views: PoolView) -> str:
    with pytest.raises(PlanError) as caught:
        CanaryState(views, 1)
    return str(caught.value)


def test_a_state_takes_groups():
    """A full pool and a mapped one, each with its own records."""
    state = CanaryState([view_of("target", FULL_SLOTS), sliding()], 1)
    assert [len(pool.records) for pool in state.pools] == [FULL_SLOTS, OWN_SLOTS]


def test_a_map_has_one_entry_a_slot_of_the_full_group():
    """A map that is shorter than the full group would be read beyond its end."""
    words = refused(view_of("target", 18), sliding())
    assert words == "slot_map of pool 'sliding' must have one entry a slot of the full group, got 16: it has 18"


def test_all_pools_may_be_mapped():
    """Where every layer has a window nothing lies in the full group: its pages are those of the map."""
    state = CanaryState([sliding()], 1)
    assert len(state.generations) * state.page_size == FULL_SLOTS


def test_a_group_has_one_map():
    """The pools of a group share slot ids, so what translates into one translates into all."""
    views = [view_of("target", FULL_SLOTS), sliding(), view_of("draft", OWN_SLOTS, group="sliding")]
    assert refused(*views) == "pools 'sliding' and 'draft' of group 'sliding' must have one slot_map"
