"""FlashInfer behind the engine: by token indices, its kernels read pages of one slot.

A wrapper is planned from the host's lengths, through a pinned buffer from which the device copies later. Each kind of
forward has a wrapper of its own, and what is planned anew first waits for the copy of the plan before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import flashinfer
import torch
from torch import Tensor

from spec_engine.attention.base import PoolAttention
from spec_engine.core import ForwardBatch

DECODE_GROUPS = (1, 2, 3, 4, 6, 8)  # query heads a KV head for which there is a decode kernel
WORKSPACE_BYTES = 128 * 2**20


class FlashInferAttention(PoolAttention):
    """Rows of one token by the decode kernel, where it has their group size, all others by the prefill kernel."""

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        decodes = max(batch.new_lens) == 1 and self.fold in DECODE_GROUPS
        self.wrapper, copied = _wrapper(indices.device, decodes, batch.kind, batch.index)
        copied.synchronize()
        numbers = {"q_data_type": self.pool.kv.dtype, "kv_data_type": self.pool.kv.dtype}
        heads = (self.kv_heads * self.fold, self.kv_heads, self.head_dim, 1)
        if decodes:
            rows = _rows(batch.kv_lens, torch.device("cpu"))
            self.wrapper.plan(rows.indptr, indices.int(), rows.last_page_lens, *heads, **numbers)
        else:
            # a mask is packed on the device, by the very index arrays
            place = torch.device("cpu") if batch.tree_mask is None else indices.device
            rows, queries = _rows(batch.kv_lens, place), _rows(batch.new_lens, place)
            mask = None if batch.tree_mask is None else _flat_mask(batch, batch.tree_mask)
            self.wrapper.plan(
                *(queries.indptr, rows.indptr, indices.int(), rows.last_page_lens, *heads),
                custom_mask=mask,
                causal=mask is None,
                **numbers,
            )
        copied.record()

    def read(self, layer: int, q: Tensor) -> Tensor:
        return self.wrapper.run(q.contiguous(), self.pool.kv[layer].unbind(1))


class _Rows(NamedTuple):
    indptr: Tensor  # [rows + 1] int32
    last_page_lens: Tensor  # [rows] int32


def _rows(lens: tuple[int, ...], device: torch.device) -> _Rows:
    """Rows of so many pages of one slot each."""
    ends = torch.tensor((0, *lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return _Rows(ends.to(device), torch.ones(len(lens), dtype=torch.int32, device=device))


def _flat_mask(batch: ForwardBatch, mask: Tensor) -> Tensor:
    """[sum(N * kv_len)] bool: everything before a tree, then its mask, row by row."""
    parts = []
    for row, (length, new) in enumerate(zip(batch.kv_lens, batch.new_lens, strict=True)):
        before = mask.new_ones(new, length - new)
        parts.append(torch.cat((before, mask[row, :new, :new]), 1).flatten())
    return torch.cat(parts)


@cache
def _wrapper(device: torch.device, decodes: bool, kind: str, index: int) -> tuple[Any, torch.cuda.Event]:
    """What plans and runs one kind of forward, and the event after which it may be planned anew."""
    make = flashinfer.BatchDecodeWithPagedKVCacheWrapper if decodes else flashinfer.BatchPrefillWithPagedKVCacheWrapper
    return make(_workspace(device), "NHD", backend="fa2"), torch.cuda.Event()


@cache
def _workspace(device: torch.device) -> Tensor:
    """Scratch of all of them: forwards follow one another on one stream."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
