"""Attention in plain torch: gathers each row's slots, then one scaled dot product a layer.

Rows with equally many new tokens (decode, draft, verify) are padded to the longest and run together; ragged
ones (prefill, extend of several requests) run row by row. Heads that share a KV head are folded into the query
dimension, so K and V are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcanary.faults import seam
from spec_engine.attention.base import PoolAttention, row_groups
from spec_engine.core import ForwardBatch


@dataclass(frozen=True, eq=False)
class _Group:
    """Rows that run as one product."""

    tokens: slice  # of the forward's tokens
    num_rows: int
    num_new: int  # tokens a row
    indices: Tensor  # [num_rows * width] int64, padded with the null slot
    mask: Tensor | None  # [num_rows, 1, group * num_new, width] additive, or None: everything is visible


class TorchAttention(PoolAttention):
    """Attention by token indices."""

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        self.groups = [self._group(batch, indices, rows, tokens) for rows, tokens in row_groups(batch.new_lens)]

    def read(self, layer: int, q: Tensor) -> Tensor:
        if len(self.groups) == 1:
            return self._attend(layer, q, self.groups[0])
        return torch.cat([self._attend(layer, q[group.tokens], group) for group in self.groups])

    def _attend(self, layer: int, q: Tensor, group: _Group) -> Tensor:
        rows, new, heads, dim = group.num_rows, group.num_new, self.kv_heads, self.head_dim
        kv = self.pool.load(layer, group.indices).view(rows, -1, 2, heads, dim)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # [rows, kv_heads, width, head_dim]
        folded = q.view(rows, new, heads, self.fold, dim).permute(0, 2, 3, 1, 4).reshape(rows, heads, -1, dim)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask)
        return out.view(rows, heads, self.fold, new, dim).permute(0, 3, 1, 2, 4).reshape(rows * new, -1, dim)

    def _group(self, batch: ForwardBatch, indices: Tensor, rows: range, tokens: slice) -> _Group:
        bounds = self.bounds[rows.start : rows.stop + 1]
        lens = tuple(end - start for start, end in pairwise(bounds))
        num_new = batch.new_lens[rows.start]
        entries = indices[bounds[0] : bounds[-1]]
        width = max(lens)
        if min(lens) != width:
            entries = _pad(entries, lens, width)
        mask = self._mask(lens, num_new, width, batch, indices.device)
        return _Group(tokens, len(lens), num_new, entries, mask)

    def _mask(
        self, lens: tuple[int, ...], num_new: int, width: int, batch: ForwardBatch, device: torch.device
    ) -> Tensor | None:
        """What each new token sees: its row's prefix, and of the new tokens its ancestors (or those before it).

        Of both no more than lies in its window.
        """
        if num_new == 1 and min(lens) == width:
            return None
        prefix = torch.tensor(lens, device=device)[:, None, None] - num_new
        column = torch.arange(width, device=device) - prefix  # index among the new tokens; negative: prefix
        node = column.clamp(0, num_new - 1).expand(-1, num_new, -1)
        if batch.tree_mask is None:
            depths = torch.arange(num_new, device=device).expand(len(lens), -1)
            visible = column <= depths[:, :, None]
        else:
            depths = batch.tree_mask.sum(-1) - 1
            visible = (column < 0) | (batch.tree_mask.gather(2, node) & (column < num_new))
        window = seam("windows.window_on_a_global_layer", batch.window)
        if window is not None:
            place = torch.where(column < 0, column, depths[:, None].expand(-1, num_new, -1).gather(2, node))
            visible &= place > depths[:, :, None] - window
        mask = torch.zeros(visible.shape, dtype=self.pool.dtype, device=device).masked_fill_(~visible, -torch.inf)
        return mask.repeat(1, self.fold, 1)[:, None]


def _pad(entries: Tensor, lens: tuple[int, ...], width: int) -> Tensor:
    """Rows of ``lens`` entries to rows of ``width``, filled up with the null slot."""
    padded = entries.new_zeros(len(lens), width)
    for row, part in enumerate(entries.split(lens)):
        padded[row, : part.shape[0]] = part
    return padded.flatten()
