"""Admit: where the entries of a forward may be written, before it is known what its rows read.

What refuses a write, and nothing else of `plan`: so that forwards whose slots are known together ask at once, in front
of the first, and each is planned when nobody waits for it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.judge.forward import NO_SLOT, ForwardPlan
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64
from kvcanary_kernels.record.device import (
    LOAD_FAILED,
    QUARANTINED,
    RESERVED,
    SHARED,
    SHARED_OWNER,
    W2,
    W3,
    W7,
    W8,
    WRITTEN,
    live_count,
    tl,
    triton,
)

BLOCK, BLOCK_OTHERS = 16, 128  # entries of a program, and those that each is compared with at a time
DEVICE_NO_SLOT = tl.constexpr(NO_SLOT)


def admit(
    forward: ForwardPlan,
    *,
    states: Tensor,
    owners: Tensor,
    num_slots: int,
    page_size: int,
    null_slots: int,
    out: Tensor,
    launches: bool = True,
) -> None:
    """The slot of each entry, or NO_SLOT where its write is refused (`Planned.safe_slots`) or it is padding.

    May be captured. For few entries: each is compared with all before it, for of those that share a slot the first
    is stored.

    forward:        bounds, slots, uids and num_live of it
    states, owners: [num_pages] int64, device truth of pages (verify)
    out:            [entries] int64
    """
    entries = forward.num_entries
    expect_int64(-(-num_slots // page_size), states=states, owners=owners)
    expect_int64(entries, out=out)
    if entries == 0:
        return
    if launches:
        _admit_kernel[(triton.cdiv(entries, BLOCK),)](
            forward.bounds,
            forward.slots,
            forward.uids,
            forward.num_live,
            states,
            owners,
            out,
            forward.num_rows,
            entries,
            num_slots,
            page_size,
            null_slots,
            BLOCK_N=BLOCK,
            BLOCK_M=BLOCK_OTHERS,
        )
        return
    rows = min(max(int(forward.num_live), 0), forward.num_rows)
    live = min(max(int(forward.bounds[rows]), 0), entries)
    slots = forward.slots[:live]
    valid = (slots >= null_slots) & (slots < num_slots)
    row = torch.searchsorted(forward.bounds[1 : rows + 1], torch.arange(live, device=slots.device), right=True)
    page = torch.where(valid, slots, 0) // page_size
    codes = page_codes(states[page], owners[page], forward.uids[row])
    is_repeated = (slots[:, None] == slots).tril(-1).any(1)
    out.fill_(NO_SLOT)
    out[:live] = torch.where(valid & ~is_repeated & ~torch.stack(tuple(codes.values())).any(0), slots, NO_SLOT)


admit_torch = partial(admit, launches=False)


@triton.jit(do_not_specialize=["num_rows", "num_entries"])
def _admit_kernel(
    bounds,
    slots,
    uids,
    num_live,
    states,
    owners,
    out,
    num_rows,
    num_entries,
    num_slots,
    page_size,
    null_slots,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    rows = tl.maximum(live_count(num_live, num_rows, True), 0)
    live = tl.minimum(tl.maximum(tl.load(bounds + rows), 0), tl.zeros([], tl.int64) + num_entries)
    o_e = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + o_e, mask=o_e < live, other=-1)
    valid = (slot >= null_slots) & (slot < num_slots)
    b_row = tl.zeros([BLOCK_N], tl.int64)
    for i_block in range(0, rows, BLOCK_M):
        o_r = i_block + tl.arange(0, BLOCK_M)
        end = tl.load(bounds + 1 + o_r, mask=o_r < rows, other=0x7FFFFFFFFFFFFFFF)
        b_row += tl.sum((end[None, :] <= o_e[:, None]).to(tl.int64), 1)
    num_same = tl.zeros([BLOCK_N], tl.int64)
    for i_block in range(0, tl.minimum(live, (tl.program_id(0) + 1) * BLOCK_N), BLOCK_M):
        o_m = i_block + tl.arange(0, BLOCK_M)
        other = tl.load(slots + o_m, mask=o_m < live, other=-1)
        num_same += tl.sum(((other[None, :] == slot[:, None]) & (o_m[None, :] < o_e[:, None])).to(tl.int64), 1)
    uid = tl.load(uids + b_row, mask=valid, other=0)
    code = page_code(slot // page_size, valid, uid, states, owners)
    tl.store(out + o_e, tl.where(valid & (num_same == 0) & (code == 0), slot, DEVICE_NO_SLOT), mask=o_e < num_entries)


@triton.jit
def page_code(page, valid, uid, states, owners):
    """At most one of W3, W7, W2, W8 an entry, by the state and owner of its page; others are not looked at."""
    state = tl.load(states + page, mask=valid, other=0)
    owner = tl.load(owners + page, mask=valid, other=0)
    shared = (owner == SHARED_OWNER) | (state == SHARED)
    quarantined = (shared == 0) & (state == QUARANTINED)
    foreign = (shared == 0) & (quarantined == 0) & (owner != uid)
    writable = (state == RESERVED) | (state == WRITTEN) | (state == LOAD_FAILED)
    kept = (shared == 0) & (quarantined == 0) & (foreign == 0) & valid & (writable == 0)
    code = tl.where(shared, W3, 0) + tl.where(quarantined, W7, 0) + tl.where(foreign, W2, 0)
    return code + tl.where(kept, W8, 0)


def page_codes(states: Tensor, owners: Tensor, uids: Tensor) -> dict[str, Tensor]:
    """The torch reference of `page_code`: whether each of them fires."""
    shared = (owners == record.SHARED_OWNER) | (states == record.SHARED)
    quarantined = ~shared & (states == record.QUARANTINED)
    foreign = ~shared & ~quarantined & (owners != uids)
    writable = (states == record.RESERVED) | (states == record.WRITTEN) | (states == record.LOAD_FAILED)
    kept = ~(shared | quarantined | foreign | writable)
    return {"W3": shared, "W7": quarantined, "W2": foreign, "W8": kept}
