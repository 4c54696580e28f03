"""A tree as linked lists: the first child of every node and its next sibling."""

from __future__ import annotations

import torch
from torch import Tensor


def retrieve_links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """``parents [bs, N] int64 -> next_token, next_sibling [bs, N] int64``, -1 where there is none.

    Siblings come in ascending order of nodes. A node whose parent does not come before it is in no list.
    """
    num_nodes = parents.shape[1]
    ids = torch.arange(num_nodes, device=parents.device)
    is_child = (parents[:, None, :] == ids[:, None]) & (ids > ids[:, None])  # [bs, parent, child]
    is_sibling = (parents[:, :, None] == parents[:, None, :]) & (ids > ids[:, None]) & _listed(parents, ids)
    return _first(is_child, ids), _first(is_sibling, ids)


def _listed(parents: Tensor, ids: Tensor) -> Tensor:
    return ((parents >= 0) & (parents < ids))[:, :, None]


def _first(is_one: Tensor, ids: Tensor) -> Tensor:
    """The lowest column that is set in each row, -1 where none is."""
    lowest = torch.where(is_one, ids, len(ids)).amin(-1)
    return torch.where(lowest < len(ids), lowest, -1)
