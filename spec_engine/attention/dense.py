"""The dense reference: token by token, gather what the token sees, one softmax in float64. Slow, plain, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_engine.attention.base import PoolAttention
from spec_engine.core import ForwardBatch


class DenseAttention(PoolAttention):
    """Attention over one list of slots a token, ``seen``: its row's prefix, then its ancestors and itself."""

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        self.seen: list[Tensor] = []
        for row, new in enumerate(batch.new_lens):
            slots = indices[self.bounds[row] : self.bounds[row + 1]]
            prefix, own = slots[: len(slots) - new], slots[len(slots) - new :]
            for token in range(new):
                ancestors = own[: token + 1] if batch.tree_mask is None else own[batch.tree_mask[row, token]]
                seen = torch.cat((prefix, ancestors))
                self.seen.append(seen if batch.window is None else seen[-batch.window :])

    def read(self, layer: int, q: Tensor) -> Tensor:
        return torch.stack([self._attend(layer, query, slots) for query, slots in zip(q, self.seen, strict=True)])

    def _attend(self, layer: int, query: Tensor, slots: Tensor) -> Tensor:
        """The attention of one token: query ``[heads, head_dim]``, slots ``[n]``."""
        k, v = self.pool.load(layer, slots).double().repeat_interleave(self.fold, 2).unbind(1)  # [n, heads, head_dim]
        scores = torch.einsum("hd,nhd->hn", query.double(), k) / self.head_dim**0.5
        return torch.einsum("hn,nhd->hd", torch.softmax(scores, -1), v).to(query.dtype)
