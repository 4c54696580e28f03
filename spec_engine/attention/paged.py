"""Attention by page tables: whole pages, as kernels with a block table read them.

- A chain (prefill, decode, extend, a draft of topk 1) is one causal pass over its own block table.
- A verified tree is a pass over its prefix, then a pass over pages of one slot that names what each node sees.
- The branches of a draft are a pass over the whole pages of the prefix, S - S % P entries for all branches at once,
  then a pass over the pages of each branch, whose first begins with the rest of the prefix.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from spec_engine.attention.base import PoolAttention, row_groups
from spec_engine.attention.page_pass import PagePass, branch_tables, merge, page_tables, visible_tables
from spec_engine.core import ForwardBatch
from spec_engine.memory.sizing import cdiv


class BlockTableAttention(PoolAttention):
    """One block table a row: entry p is taken at offset p % P of the page of entry p - p % P.

    That is true of chains and, with pages of one slot, of draft branches.
    """

    pass_type = PagePass

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        self.page_size = self.pool.page_size
        self.starts = batch.kv_indptr[:-1]
        self.lens = batch.kv_indptr.diff()
        self.width = cdiv(max(end - start for start, end in pairwise(self.bounds)), self.page_size)
        self.groups = self._groups(batch, indices)

    def read(self, layer: int, q: Tensor) -> Tensor:
        kv, scales = self.pool.rows(layer)
        split = q.view(len(q), self.kv_heads, self.fold, self.head_dim)
        outputs = [merge([part.run(kv, split[tokens], scales) for part in parts]) for tokens, parts in self.groups]
        return torch.cat(outputs).view_as(q).to(q.dtype)

    def _groups(self, batch: ForwardBatch, indices: Tensor) -> list[tuple[slice, list[PagePass]]]:
        """Tokens that run together, and the passes whose merged result is theirs."""
        if batch.tree_mask is not None:
            return [(slice(0, len(batch.slots)), self._tree(batch, batch.tree_mask, indices))]
        tables = page_tables(indices, self.starts, self.lens, self.page_size, self.width)
        return [
            (tokens, [self._chain(tables, rows, batch.new_lens[rows.start])])
            for rows, tokens in row_groups(batch.new_lens)
        ]

    def _chain(self, tables: Tensor, rows: range, num_new: int) -> PagePass:
        own = slice(rows.start, rows.stop)
        return self.pass_type(tables[own], self.lens[own], num_new, self.page_size, causal=True)

    def _tree(self, batch: ForwardBatch, mask: Tensor, indices: Tensor) -> list[PagePass]:
        num_nodes = batch.new_lens[0]
        prefix_lens = self.lens - num_nodes
        own = indices[(self.starts + prefix_lens)[:, None] + torch.arange(num_nodes, device=indices.device)]
        tables = page_tables(indices, self.starts, prefix_lens, self.page_size, self.width)
        return [
            self.pass_type(tables, prefix_lens, num_nodes, self.page_size),
            self.pass_type(*visible_tables(own, mask), num_new=1, page_size=1),
        ]


class PagedAttention(BlockTableAttention):
    """Page tables that also read draft branches which own whole pages."""

    def _groups(self, batch: ForwardBatch, indices: Tensor) -> list[tuple[slice, list[PagePass]]]:
        if batch.rows_per_request == 1:
            return super()._groups(batch, indices)
        return [(slice(0, len(batch.slots)), self._branches(batch, indices))]

    def _branches(self, batch: ForwardBatch, indices: Tensor) -> list[PagePass]:
        # row (b, k) reads [0, S - tail) on the prefix's pages    [S - tail, S + num_columns) on the pages of branch k
        topk, num_columns = batch.rows_per_request, batch.index + 1
        tails = batch.prefix_lens % self.page_size
        whole = batch.prefix_lens - tails
        own = indices[(self.starts + self.lens)[:, None] + torch.arange(-num_columns, 0, device=indices.device)]
        tables = page_tables(indices, self.starts[::topk], whole, self.page_size, self.width)
        branch_lens = tails.repeat_interleave(topk) + num_columns
        return [
            self.pass_type(tables, whole, topk, self.page_size),
            self.pass_type(branch_tables(own, num_columns, self.page_size), branch_lens, 1, self.page_size),
        ]
