"""Grant: whose the slots of blocks are from now on, as the host says."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.device import BLOCK, tl, triton

GROUP_SHIFT = 32
BLOCK_MASK = (1 << GROUP_SHIFT) - 1
SHIFT, MASK = tl.constexpr(GROUP_SHIFT), tl.constexpr(BLOCK_MASK)


def grant(changes: Tensor, owners: Tensor, *, group: int, block_size: int, launches: bool = True) -> None:
    """Store the owner of each block of one group in all of its slots. No allocation, no wait.

    changes: [words_of(at least n)] int64, contiguous: their number n; of each which block, with the number of its group
             above GROUP_SHIFT bits, and its owner. Each block of a group once; other groups are left out
    owners:  [num_slots] int64, as in `Watched`; what would lie outside is not written
    """
    if launches:
        most = len(changes) // 2
        _grant_kernel[(most,)](changes, owners, group, owners.shape[0], SIZE=block_size, BLOCK_N=BLOCK)
        return
    places, own = changes[1 : words_of(int(changes[0]))].view(-1, 2).T
    places, own = (words[places >> GROUP_SHIFT == group] for words in (places, own))
    slots = (places & BLOCK_MASK)[:, None] * block_size + torch.arange(block_size, device=places.device)
    is_inside = slots < owners.shape[0]
    owners[slots[is_inside]] = own[:, None].expand_as(slots)[is_inside]


def words_of(changes: int) -> int:
    """Of a line that says so many."""
    return 1 + 2 * changes


grant_torch = partial(grant, launches=False)


@triton.jit(do_not_specialize=["group", "num_slots"], do_not_specialize_on_alignment=["changes", "owners"])
def _grant_kernel(changes, owners, group, num_slots, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    i_change = tl.program_id(0).to(tl.int64)
    if i_change >= tl.load(changes):
        return
    place = tl.load(changes + 1 + 2 * i_change)
    if place >> SHIFT != group:
        return
    first = (place & MASK) * SIZE
    owner = tl.load(changes + 2 + 2 * i_change)
    for i_block in range(0, SIZE, BLOCK_N):
        o_n = i_block + tl.arange(0, BLOCK_N)
        o_slot = first + o_n
        m_n = (o_n < SIZE) & (o_slot < num_slots)
        tl.store(owners + o_slot, tl.zeros([BLOCK_N], tl.int64) + owner, mask=m_n)
