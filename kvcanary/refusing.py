"""Refusing: ids that a forward may not use are replaced by null slot 0 before its body runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvcanary.forward import Forward, Ints, Refused, on_host
from kvcanary.pages import Pages
from kvcanary_kernels.record import NO_OWNER


def refuse(forward: Forward, pages: Pages, disabled: frozenset[str]) -> None:
    """R1 and W1 for ids outside the pool; W2, W3, W7 and W8 for pages that the entry's request may not write.

    A refused write keeps the slot's old record, and its bytes too where the engine stores by the slots that `open`
    gives back. Switched off, W2, W3, W7 and W8 refuse nothing; W1 always does.
    """
    view = forward.pool.view
    if forward.bounds[-1] and on_host(forward.indices).view(np.uint64).max() >= view.num_slots:  # unsigned, -1 is huge
        forward.indices, forward.refused_reads = _without_outsiders(forward.indices, view.num_slots)
    if not forward.write_slots:
        return
    slots, refused = forward.planned.slots, {}
    low, high = min(forward.write_slots), max(forward.write_slots)
    if low < 0 or high >= view.num_slots:
        outside = (slots < 0) | (slots >= view.num_slots)
        refused = dict.fromkeys(outside.nonzero()[0].tolist(), "W1")
        slots, low = np.where(outside, 0, slots), 0
    writers = _writers(forward)
    if low < view.null_slots:
        writers = np.where(slots < view.null_slots, NO_OWNER, writers)  # R2 speaks of these
    foreign = pages.write_codes(slots // view.page_size, writers)
    refused |= {entry: code for entry, code in foreign.items() if code not in disabled}
    if refused:
        _replace(forward, refused)


def _writers(forward: Forward) -> Ints | np.int64:
    """[entries] the request of each; one for all where there is only one."""
    if len(forward.requests) == 1:
        return np.int64(forward.requests[0].uid)
    uids = np.array([request.uid for request in forward.requests])
    if forward.width > 1 and len(forward.write_slots) == len(uids) * forward.width:
        return uids.repeat(forward.width)
    return uids.repeat(forward.width).repeat(forward.written)


def _replace(forward: Forward, refused: dict[int, str]) -> None:
    entries = np.array(sorted(refused))
    slots = forward.planned.slots.copy()
    forward.refused = Refused(entries, slots[entries], np.array([refused[entry] for entry in entries.tolist()]))
    slots[entries] = 0
    forward.planned = forward.planned._replace(slots=slots)
    forward.slots = torch.from_numpy(slots).to(forward.slots.device)
    forward.write_slots = slots.tolist()


def _without_outsiders(ids: Tensor, num_slots: int) -> tuple[Tensor, Refused]:
    """`ids` with null slot 0 in the place of those outside the pool, and these."""
    outside = (ids < 0) | (ids >= num_slots)
    entries = outside.nonzero().flatten()
    refused = Refused(on_host(entries), on_host(ids[entries]), np.full(len(entries), "R1"))
    return torch.where(outside, 0, ids), refused
