"""The draft loop: T selections with T - 1 forwards between them, whoever runs these and by whatever arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvcanary.faults import seam
from spec_engine.drafting.chain import ChainGrowth
from spec_engine.drafting.tree import TreeGrowth

#: ``path(slots, path, parents, step)``: the slots that survivors read by, see `ancestor_path`.
Path = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Proposals(NamedTuple):
    """What follows each request's last entry, as it waited in the relay.

    probs, tokens: [bs, K];  hidden: [bs, H], behind that entry
    made_for: [bs, 2] int64, row and committed length for which they were written
    """

    probs: Tensor
    tokens: Tensor
    hidden: Tensor
    made_for: Tensor


class Forward(Protocol):
    """One draft forward over the survivors of every request, request-major rows."""

    def __call__(
        self, step: int, tokens: Tensor, path: Tensor, parents: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [rows, H] after these tokens [rows] behind ``hidden``, and what they propose, [rows, K] both.

        path: [bs, K, step + 1] int64, the slots that each row reads behind its prefix; it writes the last.
        parents: [bs, K] int64, row of its request in the forward before whose child each is; None: of one at most.
        """


def ancestor_path(slots: Tensor, path: Tensor, parents: Tensor, step: int) -> Tensor:
    """``[bs, K, step + 1] int64``: the slots of each survivor's ancestors, then its own branch's.

    slots: [bs, K, T] of the branches; path: of the survivors before; parents: [bs, K], whose child each is.
    """
    path = path.gather(1, parents[:, :, None].expand(-1, -1, step))
    return torch.cat((path, slots[:, :, step : step + 1]), -1)


def row_positions(lens: Tensor, step: int, topk: int) -> Tensor:
    """``[bs * K] int64``: where draft forward ``step`` writes, behind ``lens [bs]`` final entries."""
    return (lens + step)[:, None].expand(-1, topk).flatten()


def grow(
    growth: TreeGrowth | ChainGrowth,
    slots: Tensor,
    proposed: Proposals,
    forward: Forward,
    path_of: Path = ancestor_path,
) -> None:
    """Let a tree grow by as many steps as branches have ``slots [bs, K, T]``, from what was ``proposed``."""
    bs, topk, num_steps = slots.shape
    growth.made_for = proposed.made_for
    probs, tokens, hidden = (one[:, None] for one in proposed[:3])  # of one survivor, the root
    growth.add(probs, tokens)
    path = slots[:, :1, :0]
    for step in range(num_steps - 1):
        tokens, parents = growth.survive()
        if parents is None:
            path = slots[:, :, : step + 1].contiguous()
        else:
            hidden = hidden.gather(1, parents[:, :, None].expand(-1, -1, hidden.shape[-1]))
            read = seam("draft.columns_never_regathered", parents, step=step, num_steps=num_steps)
            path = path_of(slots, path, read, step)
        parents = parents if step else None  # all descend from the root
        hidden, probs, tokens = forward(step, tokens.flatten(), path, parents, hidden.flatten(0, 1))
        growth.add(probs.view(bs, topk, topk), tokens.view(bs, topk, topk))
        hidden = hidden.view(bs, topk, -1)
