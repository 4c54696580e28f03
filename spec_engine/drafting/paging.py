"""Copies that make a draft branch readable by whole pages: its ancestors and the prefix tail on its own pages.

A reader of page tables finds entry p of a row at offset p % P of the row's page number p // P. Branch b has pages of
its own, so what it shares with others must lie there too, at the same offsets:

- the prefix tail, entries [base, S) with base = S - S % P, once a step before the first forward (branch 0 continues the
  prefix's own page and has it already);
- its ancestors, columns [0, i) of the branch, before forward i: the selection may have let a survivor descend from
  another branch than the one whose column it takes. Branches may swap, so all sources are read before any destination
  is written.

Both are moves of the draft pool alone. Shapes depend on bs, K, T and P only: where there is nothing to copy, a pair is
(null slot, null slot).
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_engine.drafting.layout import branch_stride, tail_duplicates


def tail_copies(
    table: Tensor, rows: Tensor, committed_lens: Tensor, *, topk: int, num_steps: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Slots of the prefix tail and of its copies, by offset in the page: two ``[bs, K - 1, P - 1] int64``.

    table: the request table, whose columns reach to the end of the branches; rows, committed_lens: [bs] int64.
    """
    layout = {"topk": topk, "num_steps": num_steps, "page_size": page_size}
    sources, destinations = tail_duplicates(committed_lens, **layout)
    is_tail, row = sources != destinations, rows[:, None, None]
    return torch.where(is_tail, table[row, sources], 0), torch.where(is_tail, table[row, destinations], 0)


def ancestor_copies(slots: Tensor, parents: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Slots of each survivor's ancestors and those of its own branch: two ``[bs, K, num_columns] int64``.

    slots: [bs, K, T] int64 of the branches; parents: [bs, K] int64, the branch that holds each survivor's ancestors.
    """
    own = slots[:, :, :num_columns]
    return own.gather(1, parents[:, :, None].expand(-1, -1, num_columns)), own


def branch_prefix(row: Tensor, committed_len: int, *, topk: int, num_steps: int, page_size: int) -> Tensor:
    """``[K, S] int64``: where each branch reads the prefix, its tail from the branch's own copy.

    row: [width] int64, the request's row of the request table.
    """
    tail = committed_len % page_size
    positions = torch.arange(committed_len, device=row.device)
    shifts = torch.arange(topk, device=row.device)[:, None] * branch_stride(tail, num_steps, page_size)
    return row[positions + shifts * (positions >= committed_len - tail)]
