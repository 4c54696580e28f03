"""One pass of attention over whole pages, and how several passes over parts of a row become one.

A kernel that reads page tables knows a table and a length a row. What a draft tree reads is no single row of whole
pages, so it is read in parts, and the parts are merged by the log of the sum of their exponents (LSE): softmax over a
union is the mean of the softmaxes of its parts, weighted by their sums of exponents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_engine.memory.pools.fp8_pool import dequantise


@dataclass(frozen=True, eq=False)
class PagePass:
    """Rows of ``num_new`` queries that see the first ``lens`` entries of their pages.

    tables: [rows, width] int64 page ids, padded with the null page
    lens:   [rows] int64, entries in these pages, at most width * page_size
    causal: the last ``num_new`` entries are the queries' own, and each sees those before it; else all see all
    """

    tables: Tensor
    lens: Tensor
    num_new: int
    page_size: int
    causal: bool = False

    def run(self, kv: Tensor, q: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attention of q ``[rows * num_new, kv_heads, fold, head_dim]``, and its LSE, without head_dim.

        kv: [slots, 2, kv_heads, head_dim]; scales: [slots, 2] of e4m3 numbers, None where kv are the numbers that they
        stand for. Both at least in float32. A query that sees nothing gets zeros and an LSE of -inf.
        """
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        kv = self._entries(kv)  # [rows, entries, 2, heads, dim]
        if scales is not None:
            kv = dequantise(kv, self._entries(scales), q.dtype)
        entries = torch.arange(kv.shape[1], device=kv.device)
        unread = entries >= self.lens[:, None]
        k, v = kv.to(q.dtype).masked_fill(unread[:, :, None, None, None], 0).unbind(2)  # 0 * NaN is NaN
        rows = q.view(len(k), self.num_new, *q.shape[1:])
        scores = torch.einsum("rnhfd,rlhd->rnhfl", rows, k) / q.shape[-1] ** 0.5
        hidden = entries >= self._ends()[:, :, None]
        scores = scores.masked_fill(hidden[:, :, None, None], -torch.inf)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
        return torch.einsum("rnhfl,rlhd->rnhfd", weights, v).reshape(q.shape), lse.flatten(0, 1)

    def _entries(self, slots: Tensor) -> Tensor:
        """[rows, entries, ...]: what the pages hold of ``slots [slots, ...]``."""
        return slots.view(-1, self.page_size, *slots.shape[1:])[self.tables].flatten(1, 2)

    def _ends(self) -> Tensor:
        """[rows, num_new] int64: where what each query sees ends."""
        if not self.causal:
            return self.lens[:, None].expand(-1, self.num_new)
        return self.lens[:, None] + torch.arange(1 - self.num_new, 1, device=self.lens.device)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The attention over the union of disjoint parts ``(output [..., head_dim], LSE [...])``, one of them not empty."""
    if len(parts) == 1:
        return parts[0][0]
    outputs, lses = (torch.stack(values) for values in zip(*parts, strict=True))
    weights = torch.softmax(lses, 0)
    return (outputs * weights[..., None]).sum(0)


def page_tables(indices: Tensor, starts: Tensor, lens: Tensor, page_size: int, width: int) -> Tensor:
    """[rows, width] int64: the page of every ``page_size``-th entry of rows ``indices[start : start + len]``."""
    entries = torch.arange(width, device=indices.device) * page_size
    inside = entries < lens[:, None]
    places = torch.where(inside, starts[:, None] + entries, 0)
    return torch.where(inside, indices[places] // page_size, 0)


def branch_tables(slots: Tensor, num_columns: int, page_size: int) -> Tensor:
    """The pages of the first columns of each branch, each once: ``[rows, T] -> [rows, num_columns + 1] int64``.

    Padded with the null page. Later columns lie on pages that this step neither reads nor has room for
    (sgl-project/sglang#27360).
    """
    pages = slots[:, :num_columns] // page_size
    is_new = torch.ones_like(pages, dtype=torch.bool)
    is_new[:, 1:] = pages[:, 1:] != pages[:, :-1]
    return pages.new_zeros(len(pages), num_columns + 1).scatter_(1, is_new.cumsum(1) - 1, pages)


def visible_tables(slots: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of pages of one slot, a row a tree node: what the node sees first, then the rest; and how many it sees.

    slots: [bs, N] int64 of the tree's nodes; mask: [bs, N, N] bool, node sees node. Returns [bs * N, N], [bs * N].
    """
    order = torch.argsort(mask, dim=-1, descending=True, stable=True)
    tables = slots[:, None].expand_as(order).gather(2, order)
    return tables.flatten(0, 1), mask.sum(-1).flatten()
