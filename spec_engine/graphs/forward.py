"""Static forwards: one model call over buffers that never move, with index arrays that the device builds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.faults import seam
from kvcanary.invariants import check_index_buffer
from kvcanary_kernels.engine.index import index_rows, index_rows_torch


@dataclass(frozen=True, eq=False)
class StaticForward:
    """What `ForwardBatch` is to an eager forward, in tensors at fixed addresses; all int64 but the mask.

    Row r belongs to request r // width, reads indices[indptr[r]:indptr[r + 1]] and writes entries
    [bounds[r], bounds[r + 1]), the last of what it reads. Padding lies in null slots.

    new:       most entries that a row writes;  depth: of its trees, in steps from the root
    ancestors: entries of a row between its prefix and what it writes
    parents:   entry of the forward, -1 where an entry continues its row; None: every row is a chain
    lineage:   [rows], row of the request in the draft forward before whose entry each goes on from; None: nobody asks
    tree_mask: [requests, N, N] bool, node sees node; None: causal
    """

    kind: str
    index: int
    width: int
    new: int
    indptr: Tensor
    indices: Tensor
    bounds: Tensor
    slots: Tensor
    tokens: Tensor
    positions: Tensor
    parents: Tensor | None = None
    lineage: Tensor | None = None
    tree_mask: Tensor | None = None
    ancestors: int = 0
    depth: int = 0

    @classmethod
    def allocate(
        cls,
        kind: str,
        index: int,
        table: Tensor,
        *,
        requests: int,
        new: int,
        width: int = 1,
        ancestors: int = 0,
        depth: int = 0,
        is_tree: bool = False,
        has_lineage: bool = False,
    ) -> StaticForward:
        """Buffers for so many requests of this request table, each row writing ``new`` entries at most.

        IndexBufferError unless every row may name a whole row of the table, its ancestors and what it writes.
        """
        rows, device = requests * width, table.device

        def zeros(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int64, device=device)

        indices = zeros(rows * (table.shape[1] + ancestors + new))
        indices = seam("bounds.kv_indices_without_topk", indices, topk=width)
        check_index_buffer(f"{kind}[{index}]", width, requests, table.shape[1], ancestors + new, indices.numel())
        return cls(
            kind,
            index,
            width,
            new,
            zeros(rows + 1),
            indices,
            torch.arange(rows + 1, device=device) * new,
            zeros(rows * new),
            zeros(rows * new),
            zeros(rows * new),
            zeros(rows * new) - 1 if is_tree else None,
            zeros(rows) if has_lineage else None,
            torch.zeros(requests, new, new, dtype=torch.bool, device=device) if is_tree else None,
            ancestors,
            depth,
        )

    @property
    def num_rows(self) -> int:
        return self.indptr.numel() - 1

    @property
    def max_kv_len(self) -> int:
        """Entries of the longest row."""
        return self.indices.numel() // self.num_rows

    def take(self, tokens: Tensor, parents: Tensor | None) -> None:
        """The tokens of a draft's rows [rows], and [requests, width] whose children these are, where somebody asks."""
        if self.lineage is None or parents is None:
            self.tokens.copy_(tokens)
        else:
            torch._foreach_copy_([self.tokens, self.lineage], [tokens, parents.flatten()])  # in one launch

    def read(
        self,
        table: Tensor,
        rows: Tensor,
        prefix_lens: Tensor,
        tails: Tensor,
        num_slots: int,
        tail_lens: Tensor | None = None,
    ) -> None:
        """Each row reads the prefix of its request in the table, then its tail; arguments of `index_rows`."""
        build = index_rows if tails.is_cuda else index_rows_torch
        build(
            table,
            rows,
            prefix_lens,
            tails,
            tail_lens=tail_lens,
            num_slots=num_slots,
            kv_indptr=self.indptr,
            kv_indices=self.indices,
        )


def slots_at(table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """The slots of row positions, whatever shape ``rows`` and ``positions`` make together; cut to the table."""
    return table[rows, positions.clamp(0, table.shape[1] - 1)]
