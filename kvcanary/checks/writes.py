"""Plans against pools and grants: ids that no forward may use become null slot 0; stores that come twice, or never."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.calls.entries import Entries, fired_writes, named
from kvcanary.calls.forward import Forward, Ints, Refused, on_host
from kvcanary.calls.violation_log import ViolationBatch
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


def judge_slots(forward: Forward) -> list[ViolationBatch]:
    """W1 and R1 for ids outside the pool, W4 for every slot that an earlier entry of this forward writes."""
    violations = []
    if forward.refused is not None:
        entries, codes = forward.refused.entries, forward.refused.codes
        violations += [fired_writes(code, forward, entries[codes == code]) for code in np.unique(codes).tolist()]
    if forward.refused_reads is not None:
        violations.append(_outside_pool(forward, forward.refused_reads))
    if len(set(forward.write_slots)) < len(forward.write_slots):
        violations.append(fired_writes("W4", forward, _repeated(forward)))
    return violations


def judge_layer(forward: Forward, layer: int) -> list[ViolationBatch]:
    """W4 at the first slot of the forward for a layer whose bit in the bitmap is set already."""
    if not forward.num_entries or not forward.stored >> layer & 1:
        return []
    return [fired_writes("W4", forward, np.array([0]), layers=_layers(forward, 1 << layer))]


def judge_layers(forward: Forward) -> list[ViolationBatch]:
    """R12 for everything that not every layer has stored."""
    if forward.stored == forward.pool.full_layers:
        return []
    which = np.flatnonzero(forward.planned.slots >= forward.pool.view.null_slots)
    return [fired_writes("R12", forward, which, layers=_layers(forward, ~forward.stored))]


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
    return forward.uids.repeat(forward.width).repeat(forward.written)


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


def _layers(forward: Forward, bitmap: int) -> NDArray[np.bool_]:
    """[n, layers] bool: the same layers for every entry."""
    layers = [bool(bitmap >> layer & 1) for layer in range(forward.pool.view.num_layers)]
    return np.broadcast_to(layers, (forward.num_entries, len(layers)))


def _repeated(forward: Forward) -> Ints:
    """Entries whose slot an earlier one writes; padding may share null slots."""
    slots, entries = forward.planned.slots, np.arange(forward.num_entries)
    first = np.empty(forward.pool.view.num_slots, np.int64)
    first[slots[::-1]] = entries[::-1]  # of equal slots the last assignment counts
    return np.flatnonzero((first[slots] != entries) & (slots >= forward.pool.view.null_slots))


def _outside_pool(forward: Forward, refused: Refused) -> ViolationBatch:
    """R1 for every entry whose id is outside the pool."""
    bounds, entries = np.array(forward.bounds), refused.entries
    rows = np.searchsorted(bounds[1:], entries, side="right")
    positions = entries - bounds[rows] + np.array(forward.starts, np.int64)[rows]
    names = [request.request_id for request in forward.requests]
    read = Entries(refused.ids, positions, rows // forward.width, names, names=named(forward.pool, refused.names))
    return read.fired("R1", forward.pool, forward.site, forward.step, np.arange(len(entries)))
