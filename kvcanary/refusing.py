"""Refusing: ids that a forward may not use are replaced by null slot 0 before its body runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvcanary.forward import Forward, Refused, on_host
from kvcanary.pages import Pages
from kvcanary_kernels.record import NO_OWNER


def refuse(forward: Forward, pages: Pages, disabled: frozenset[str]) -> None:
    """R1 and W1 for ids outside the pool; W2, W3, W7 and W8 for pages that the entry's request may not write.

    A refused write keeps the slot's old record, and its bytes too where the engine stores by the slots that `open`
    gives back. Switched off, W2, W3, W7 and W8 refuse nothing; W1 always does.
    """
    num_slots, slots = forward.pool.view.num_slots, forward.planned.slots
    if forward.bounds[-1] and on_host(forward.indices).view(np.uint64).max() >= num_slots:  # without a sign, -1 is huge
        forward.indices, forward.refused_reads = _without_outsiders(forward.indices, num_slots)
    if not len(slots):
        return
    refused: dict[int, str] = {}
    if min(forward.write_slots) < 0 or max(forward.write_slots) >= num_slots:
        outside = (slots < 0) | (slots >= num_slots)
        refused = dict.fromkeys(outside.nonzero()[0].tolist(), "W1")
        slots = np.where(outside, 0, slots)
    uids = np.array([request.uid for request in forward.requests for _ in range(forward.width)], np.int64)
    writers = uids if len(uids) == len(slots) else uids.repeat(forward.written)
    null = slots < forward.pool.view.null_slots
    if null.any():
        writers = np.where(null, NO_OWNER, writers)  # R2 speaks of these
    foreign = pages.write_codes(slots // forward.pool.view.page_size, writers)
    refused |= {entry: code for entry, code in foreign.items() if code not in disabled}
    if refused:
        _replace(forward, refused)


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
