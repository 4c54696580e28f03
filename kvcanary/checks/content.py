"""Content checks: are the bytes of slots still those that were written?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.entries import Entries
from kvcanary.calls.forward import Ints, on_host
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.mailbox import to_device
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import CONTENT_B


def find_changed(
    pool: PoolState,
    slots: Ints,
    entries_of: Callable[[], Entries],
    site: tuple[str, int],
    step: int,
    both_fingerprints: bool,
) -> list[ViolationBatch]:
    """R9 for every slot whose bytes changed; R3 where only the canary's fingerprint of them did.

    `entries_of` describes the slots in order, and is asked only when one fired. Null slots hold padding and are never
    compared, and nothing is where the pool's memory is gone.
    """
    if pool.is_gone:
        return []
    where = to_device(torch.from_numpy(slots), pool.records.device)
    differs_a, differs_b = _differences(pool, where)
    some_layer = differs_a.any(0)
    fired = some_layer | differs_b if both_fingerprints else some_layer
    fired = fired & (where >= pool.view.null_slots)
    if not fired.any():
        return []
    entries, layers = entries_of(), on_host(differs_a).T
    violations = []
    for code, own in (("R9", some_layer & differs_b), ("R3", ~(some_layer & differs_b))):
        which = np.flatnonzero(on_host(fired & own))
        is_record = np.broadcast_to(code == "R3", len(layers))
        violations.append(entries.fired(code, pool, site, step, which, layers=layers, fingerprint_violations=is_record))
    return violations


def _differences(pool: PoolState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Which slots differ from their records: in fingerprint a by layer [layers, n], in fingerprint b [n]; bool."""
    fingerprint_a, fingerprint_b = fingerprints_of_slots(pool, slots)
    differs_a = fingerprint_a != pool.content_a.index_select(1, slots)
    return differs_a, fingerprint_b != pool.records[:, CONTENT_B].index_select(0, slots)
