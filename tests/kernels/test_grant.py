"""Owners of blocks, stored in their slots."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.watch.grant import GROUP_SHIFT, grant, grant_torch

KEPT = -77


@pytest.mark.parametrize("size", [1, 12, 130])
@pytest.mark.parametrize("act", [grant, grant_torch], ids=["triton", "torch"])
def test_every_slot_of_a_block_gets_its_owner(act, size: int, device: str) -> None:
    """Of one group; what is not said, other groups and what lies outside are left out, and all other slots stay."""
    told = [
        ((0, 2), 9),
        ((1, 3), 4),
        ((-1, 1), 1),
        ((0, 0), -1),
        ((0, 5), 6),
        ((0, 4), -(1 << 62)),
        ((0, (1 << 32) - 1), 3),
    ]
    slots = 5 * size - size // 2  # the last block is cut
    owners = torch.full((slots,), KEPT, dtype=torch.int64, device=device)
    words = [word for (group, block), owner in told for word in (group << GROUP_SHIFT | block, owner)]
    words += [1, 5]  # of another step, behind those that are said
    act(torch.tensor([len(told), *words], device=device), owners, group=0, block_size=size)
    wanted = {2: 9, 0: -1, 4: -(1 << 62)}
    assert owners.tolist() == [wanted.get(slot // size, KEPT) for slot in range(slots)]
