"""Pools that go: bytes that are gone with their pool, when its engine sleeps, wakes, or allocates it anew."""

from __future__ import annotations

import numpy as np
import torch

from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.record.layout import LAYERS_HIGH, LAYERS_LOW

SLOTS_AT_ONCE = 1 << 14


def forget_bytes(pool: PoolState, record_store: RecordStore, step: int) -> None:
    """No layer of any slot is written any more, whoever wrote it: who reads an entry reads what is gone (R12)."""
    rows, layers = slice(pool.base, pool.base + pool.view.num_slots), slice(LAYERS_LOW, LAYERS_HIGH + 1)
    record_store.memory[rows, layers] = 0
    for records in (pool.records, pool.expected):
        records[:, layers] = 0
    record_store.epoch += 1
    record_store.judged[:] = False
    pool.cleared_in = step


@torch.inference_mode()
def take_as_it_lies(state: CanaryState, pool: PoolState) -> None:
    """What lies in the pool now is what its slots should hold, until somebody writes there."""
    for first in range(0, pool.view.num_slots, SLOTS_AT_ONCE):
        end = min(first + SLOTS_AT_ONCE, pool.view.num_slots)
        slots = state.ints(np.arange(first, end).tolist())
        pool.write_fingerprints(slots, *fingerprints_of_slots(pool, slots))
