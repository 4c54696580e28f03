"""Admission: ids that a forward may not use are replaced by null slot 0 before its body runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.forward import Forward, Ints, Refused, on_host
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.checks.writes import judge_slots
from kvcanary.ledger.page_states import Pages
from kvcanary.pools.slot_maps import NOWHERE, locate_slots
from kvcanary_kernels.record.layout import NO_OWNER


def refuse(forward: Forward, pages: Pages, disabled: frozenset[str]) -> list[ViolationBatch]:
    """R1 and W1 for ids outside the pool; W2, W3, W7 and W8 for pages that the entry's request may not write.

    A refused write keeps the slot's old record, and its bytes too where the engine stores by the slots that `open`
    gives back. Switched off, W2, W3, W7 and W8 refuse nothing; W1 always does. Nothing of a usable forward is refused.
    """
    if forward.pool.view.slot_map is not None:
        _translate(forward)
    _refuse_reads(forward)
    if forward.num_entries:
        _refuse_writes(forward, pages, disabled)
    return judge_slots(forward)


def _translate(forward: Forward) -> None:
    """Where the slots that the plans name lie in the pool as its map is now."""
    view = forward.pool.view
    forward.pool_indices, _ = locate_slots(view, forward.indices)
    forward.pool_slots, _ = locate_slots(view, forward.slots)
    forward.slot_names = forward.planned.slots.copy()
    forward.planned.slots[:] = on_host(forward.pool_slots)


def _refuse_reads(forward: Forward) -> None:
    view = forward.pool.view
    if not forward.bounds[-1] or on_host(forward.pool_indices).view(np.uint64).max() < view.num_slots:
        return  # unsigned, -1 is huge
    _, outside = locate_slots(view, forward.indices)
    nowhere = forward.pool_indices == NOWHERE if view.slot_map is not None else outside
    if outside.any():
        forward.refused_reads = _outsiders(forward, outside)
        forward.indices = torch.where(outside, 0, forward.indices)
    forward.pool_indices = torch.where(outside | nowhere, 0, forward.pool_indices)


def _outsiders(forward: Forward, outside: Tensor) -> Refused:
    """Ids that no forward may use, without those that lie before their rows' windows."""
    judged = on_host(outside).copy()
    for bound, skipped in zip(forward.bounds, forward.skipped, strict=False):
        judged[bound : bound + skipped] = False
    entries = judged.nonzero()[0]
    ids, names = (on_host(values)[entries] for values in (forward.pool_indices, forward.indices))
    return Refused(entries, ids, names, np.full(len(entries), "R1"))


def _refuse_writes(forward: Forward, pages: Pages, disabled: frozenset[str]) -> None:
    view, refused = forward.pool.view, dict[int, str]()
    slots, names = forward.planned.slots, forward.slot_names
    low, high = min(forward.write_slots), max(forward.write_slots)
    if low < 0 or high >= view.num_slots:
        outside = on_host(locate_slots(view, forward.slots)[1])
        refused = dict.fromkeys(outside.nonzero()[0].tolist(), "W1")
        slots, low = np.where(outside | (slots < 0), 0, slots), 0
    writers = _writers(forward)
    if low < view.null_slots:
        is_null = slots < view.null_slots
        writers, names = np.where(is_null, NO_OWNER, writers), np.where(is_null, 0, names)  # R2 speaks of these
    foreign = pages.write_codes(names // view.page_size, writers)
    refused |= {entry: code for entry, code in foreign.items() if code not in disabled}
    if refused or slots is not forward.planned.slots:
        _replace(forward, slots, refused)


def _writers(forward: Forward) -> Ints | np.int64:
    """[entries] the request of each; one for all where there is only one."""
    if len(forward.requests) == 1:
        return np.int64(forward.requests[0].uid)
    uids = np.array([request.uid for request in forward.requests])
    if forward.width > 1 and len(forward.write_slots) == len(uids) * forward.width:
        return uids.repeat(forward.width)
    return uids.repeat(forward.width).repeat(forward.written)


def _replace(forward: Forward, slots: Ints, refused: dict[int, str]) -> None:
    """Write `slots`, and null slot 0 for the refused entries."""
    entries = np.array(sorted(refused), np.int64)
    asked = forward.planned.slots[entries], forward.slot_names[entries]
    forward.refused = Refused(entries, *asked, np.array([refused[entry] for entry in entries.tolist()], np.str_))
    slots, names = slots.copy(), forward.slot_names.copy()
    slots[entries] = names[entries] = 0
    forward.planned.slots[:], forward.slot_names = slots, names
    device = forward.slots.device
    forward.slots, forward.pool_slots = torch.from_numpy(names).to(device), torch.from_numpy(slots).to(device)
    forward.write_slots = slots.tolist()
