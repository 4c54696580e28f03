"""Grant: whose the slots of blocks are from now on, as the host says."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.record.device import BLOCK, tl, triton

#: Columns of a change: the group whose slots they are, the block, and its owner; a group below 0 is padding.
CHANGE_WIDTH = 3
WIDTH = tl.constexpr(CHANGE_WIDTH)


def grant(changes: Tensor, owners: Tensor, *, group: int, block_size: int, launches: bool = True) -> None:
    """Store the owner of each block of one group in all of its slots. No allocation, no wait.

    changes: [n > 0, CHANGE_WIDTH] int64, each block of a group once; those of other groups are left out
    owners:  [num_slots] int64, as in `Watched`; what would lie outside is not written
    """
    if launches:
        _grant_kernel[(changes.shape[0],)](changes, owners, group, owners.shape[0], SIZE=block_size, BLOCK_N=BLOCK)
        return
    _, blocks, own = changes[changes[:, 0] == group].unbind(1)
    slots = blocks[:, None] * block_size + torch.arange(block_size, device=blocks.device)
    is_inside = (slots >= 0) & (slots < owners.shape[0])
    owners[slots[is_inside]] = own[:, None].expand_as(slots)[is_inside]


grant_torch = partial(grant, launches=False)


@triton.jit(do_not_specialize=["group", "num_slots"], do_not_specialize_on_alignment=["changes", "owners"])
def _grant_kernel(changes, owners, group, num_slots, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    line = changes + tl.program_id(0).to(tl.int64) * WIDTH
    if tl.load(line) != group:
        return
    first = tl.load(line + 1) * SIZE
    owner = tl.load(line + 2)
    for i_block in range(0, SIZE, BLOCK_N):
        o_n = i_block + tl.arange(0, BLOCK_N)
        o_slot = first + o_n
        m_n = (o_n < SIZE) & (o_slot >= 0) & (o_slot < num_slots)
        tl.store(owners + o_slot, tl.zeros([BLOCK_N], tl.int64) + owner, mask=m_n)
