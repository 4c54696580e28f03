"""FlashInfer behind the engine: by token indices, its kernels read pages of one slot.

A wrapper is planned from the host's lengths, through a pinned buffer from which the device copies later: what is
planned anew first waits for the copy of the plan before. Each kind of forward has a wrapper of its own, so that the
wait is over before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import flashinfer
import torch
from torch import Tensor

from spec_engine.attention.base import PoolAttention
from spec_engine.core import ForwardBatch
from spec_engine.memory.pools.pool import KVPool

DECODE_GROUPS = (1, 2, 3, 4, 8)  # query heads a KV head for which FlashInfer 0.6.14 has a decode kernel
WORKSPACE_BYTES = 128 * 2**20


class FlashInferAttention(PoolAttention):
    """Rows of one token by the decode kernel, where it has their group size, all others by the prefill kernel."""

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        decodes = max(batch.new_lens) == 1 and self.fold in DECODE_GROUPS
        self.planned = _planned(indices.device, decodes, batch.kind, batch.index)
        self.planned.plan(self.pool, self.fold, batch.kv_lens, batch.new_lens, indices, batch.tree_mask)

    def read(self, layer: int, q: Tensor) -> Tensor:
        return self.planned.run(self.pool, layer, q)


class Planned:
    """One wrapper and the event after which it may be planned anew."""

    def __init__(self, device: torch.device, decodes: bool, **buffers: Any) -> None:
        """``buffers``: of a wrapper that a CUDA graph may hold, as FlashInfer names them."""
        self.decodes = decodes
        make = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        if decodes:
            make = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self.wrapper = make(_workspace(device), "NHD", backend="fa2", **buffers)
        self.copied = torch.cuda.Event()

    def plan(
        self,
        pool: KVPool,
        fold: int,
        kv_lens: Sequence[int],
        new_lens: Sequence[int],
        indices: Tensor,
        mask: Tensor | None = None,
    ) -> None:
        """Rows of ``kv_lens`` entries of ``indices``, the last ``new_lens`` of them new; mask [rows, N, N] bool."""
        self.copied.synchronize()
        place = torch.device("cpu") if mask is None else indices.device  # a mask is packed by the index arrays
        kv_heads, head_dim = pool.kv.shape[-2:]
        rows = (_ends(kv_lens, place), indices.int(), torch.ones(len(kv_lens), dtype=torch.int32, device=place))
        heads = (kv_heads * fold, kv_heads, head_dim, 1)
        numbers = {"q_data_type": pool.kv.dtype, "kv_data_type": pool.kv.dtype}
        if self.decodes:
            self.wrapper.plan(*rows, *heads, **numbers)
        else:
            seen = None if mask is None else _flat_mask(kv_lens, new_lens, mask)
            self.wrapper.plan(_ends(new_lens, place), *rows, *heads, custom_mask=seen, causal=mask is None, **numbers)
        self.copied.record()

    def run(self, pool: KVPool, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        return self.wrapper.run(q.contiguous(), pool.kv[layer].unbind(1), out=out)


def captured(pool: KVPool, num_rows: int, max_entries: int, *, decodes: bool, max_nodes: int = 0) -> Planned:
    """A wrapper whose `Planned.run` a CUDA graph may hold: `Planned.plan` before each replay fills its buffers.

    num_rows: of every plan; max_entries: indices of the largest; max_nodes: N of its trees, 0: chains alone. A row that
    stands for nobody reads one entry of the null page.
    """

    def ints(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=pool.kv.device)

    rows = (ints(num_rows + 1), ints(max_entries), ints(num_rows))
    if decodes:
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        return Planned(pool.kv.device, True, use_cuda_graph=True, **dict(zip(names, rows, strict=True)))
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers = dict(zip(names, rows, strict=True)) | {"qo_indptr_buf": ints(num_rows + 1)}
    if max_nodes:
        num_bytes = max_nodes * max_entries // 8 + num_rows  # each row's bits begin at a byte
        mask = torch.zeros(num_bytes, dtype=torch.uint8, device=pool.kv.device)
        buffers |= {"custom_mask_buf": mask, "mask_indptr_buf": ints(num_rows + 1)}
    return Planned(pool.kv.device, False, use_cuda_graph=True, **buffers)


def _ends(lens: Sequence[int], device: torch.device) -> Tensor:
    """[len(lens) + 1] int32: where rows of so many entries begin and end."""
    return torch.tensor((0, *lens)).cumsum(0).to(device, torch.int32)


def _flat_mask(kv_lens: Sequence[int], new_lens: Sequence[int], mask: Tensor) -> Tensor:
    """[sum(N * kv_len)] bool: everything before a tree, then its mask, row by row."""
    parts = []
    for row, (length, new) in enumerate(zip(kv_lens, new_lens, strict=True)):
        before = mask.new_ones(new, length - new)
        parts.append(torch.cat((before, mask[row, :new, :new]), 1).flatten())
    return torch.cat(parts)


@cache
def _planned(device: torch.device, decodes: bool, kind: str, index: int) -> Planned:
    """That of one kind of forward."""
    return Planned(device, decodes)


@cache
def _workspace(device: torch.device) -> Tensor:
    """Scratch of all of them: forwards follow one another on one stream."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
