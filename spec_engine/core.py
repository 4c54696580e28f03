"""Types that every part of the engine shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kvcanary import first_visible
from kvcanary.invariants import check_rows_distinct
from spec_engine.memory.request_table import RequestTable
from spec_engine.request import Request
from spec_engine.step.relay import Relay
from spec_engine.step.transfer import Ints, to_device, together


@dataclass(frozen=True, eq=False)
class Batch:
    """The requests of one step and the lengths that acceptance has made final."""

    requests: tuple[Request, ...]
    ids: tuple[str, ...]
    rows: Tensor  # [bs] int64, request-table rows
    lens: tuple[int, ...]  # committed length S of each request, as the device has it
    lens_tensor: Tensor  # [bs] int64, the same
    bonus: Tensor  # [bs] int64, token S of each request past its prefill

    @classmethod
    def of(cls, requests: Sequence[Request], relay: Relay, known_lens: Sequence[int] | None = None) -> Batch:
        """``known_lens``: what the relay says of these requests, where the host knows it; else it waits until it is
        collected.
        """
        ids = tuple(request.request_id for request in requests)
        row_numbers = [request.row for request in requests]
        check_rows_distinct(ids, row_numbers)
        rows = to_device(row_numbers, relay.lens.device)
        lens = relay.lens.index_select(0, rows)
        known = tuple(lens.tolist() if known_lens is None else known_lens)
        return cls(tuple(requests), ids, rows, known, lens, relay.bonus.index_select(0, rows))

    def select(self, indices: Sequence[int]) -> Batch:
        """The requests at ``indices``, with this batch's lengths."""
        chosen = to_device(indices, self.rows.device)
        return Batch(
            tuple(self.requests[b] for b in indices),
            tuple(self.ids[b] for b in indices),
            self.rows[chosen],
            tuple(self.lens[b] for b in indices),
            self.lens_tensor[chosen],
            self.bonus[chosen],
        )

    def shifted(self, shifts: Sequence[int]) -> Batch:
        """The same requests in a pool whose rows hold so many final entries more than are committed."""
        if not any(shifts):
            return self
        lens = tuple(length + shift for length, shift in zip(self.lens, shifts, strict=True))
        return replace(self, lens=lens, lens_tensor=to_device(lens, self.rows.device))

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One model forward: which slots each row reads, and which slots, tokens and positions it writes.

    A row is one sequence (prefill, decode, verify, extend) or one draft branch. Row r reads
    ``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``: its prefix, then the ``new_lens[r]`` tokens of this forward.
    """

    kind: str  # "prefill", "decode", "draft", "verify" or "extend"
    index: int  # which one of its kind within the step
    requests: tuple[str, ...]
    rows_per_request: int
    prefix_lens: Tensor  # [requests] int64, committed lengths
    kv_indptr: Tensor  # [rows + 1] int64
    kv_indices: Tensor  # [nnz] int64 slots
    kv_lens: tuple[int, ...]  # entries of each row
    new_lens: tuple[int, ...]  # tokens of each row in this forward
    slots: Tensor  # [n] int64, where this forward writes
    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    parents: Tensor | None = None  # [n] int64, index of the tree parent in this forward or -1; None: chains
    lineage: Tensor | None = None  # [rows] int64, row of the request in the draft forward before that each goes on from
    tree_mask: Tensor | None = None  # [requests, N, N] bool, node sees node; None: causal
    window: int | None = None  # tokens that a reader sees, itself included; None: all
    starts: Tensor | None = None  # [rows] int64, position of each row's first entry; None: 0
    q_indptr: Tensor | None = None  # [rows + 1] int64, where each row's tokens begin; None: whoever asks adds them up


def chain_forward(
    kind: str, index: int, batch: Batch, table: RequestTable, tokens: Tensor | Ints, new_lens: Sequence[int]
) -> ForwardBatch:
    """A forward in which every row continues its committed prefix by ``new_lens[r]`` tokens in a line.

    tokens: [n] int64, on the device, or the host's, which go there together with all else that the host knows
    """
    rows = [request.row for request in batch.requests]
    spans = [(row, start, start + new) for row, start, new in zip(rows, batch.lens, new_lens, strict=True)]
    kv_lens = tuple(end for _, _, end in spans)
    kv_indices = concat([table.table[row, :end] for row, _, end in spans])
    is_whole = not any(batch.lens)
    known = [
        _bounds(kv_lens),
        _bounds(new_lens),
        np.concatenate([np.arange(start, end) for _, start, end in spans]),
        () if isinstance(tokens, Tensor) else tokens,
    ]
    kv_indptr, q_indptr, positions, own = together(known, kv_indices.device)
    return ForwardBatch(
        kind=kind,
        index=index,
        requests=batch.ids,
        rows_per_request=1,
        prefix_lens=batch.lens_tensor,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_lens=kv_lens,
        new_lens=tuple(new_lens),
        slots=kv_indices if is_whole else concat([table.table[row, start:end] for row, start, end in spans]),
        tokens=tokens if isinstance(tokens, Tensor) else own,
        positions=positions,
        q_indptr=q_indptr,
    )


def within_window(forward: ForwardBatch, window: int) -> ForwardBatch:
    """The same forward by the entries alone that its rows' first tokens, and so all others, can see."""
    starts = [
        first_visible(length - new, window) for length, new in zip(forward.kv_lens, forward.new_lens, strict=True)
    ]
    kv_lens = tuple(length - start for length, start in zip(forward.kv_lens, starts, strict=True))
    rows = zip(forward.kv_indices.split(forward.kv_lens), starts, strict=True)
    return replace(
        forward,
        kv_indptr=indptr(kv_lens, forward.kv_indices.device),
        kv_indices=concat([row[start:] for row, start in rows]),
        kv_lens=kv_lens,
        window=window,
        starts=to_device(starts, forward.kv_indices.device),
    )


def indptr(lens: Sequence[int], device: torch.device) -> Tensor:
    """Row starts of a ragged list: ``[len(lens) + 1] int64``."""
    return to_device(_bounds(lens), device)


def _bounds(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def concat(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` that leaves a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
