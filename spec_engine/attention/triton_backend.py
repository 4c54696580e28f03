"""Our Triton kernel behind the engine: by token indices, and by whole pages in passes that are merged."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvcanary_kernels.engine.attention import attention_workspace, paged_attention
from spec_engine.attention.base import Alone, PoolAttention
from spec_engine.attention.long_chunks import LongChunks, is_long, is_plain
from spec_engine.attention.page_pass import PagePass
from spec_engine.attention.paged import PagedAttention
from spec_engine.core import ForwardBatch, indptr
from spec_engine.memory.pools.pool import KVPool


class TritonAttention(PoolAttention):
    """Attention by token indices: any rows at once. Lengths are read on the device, so the host waits for nothing.

    Long chunks of prompts go to cuDNN, where there is one that is faster than our kernel (`LongChunks`).
    """

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        num_rows, num_heads = len(batch.new_lens), self.kv_heads * self.fold
        self.long = LongChunks(self.pool, batch, num_heads, indices) if is_long(self.pool, batch) else None
        if self.long is not None:
            return
        longest = {"max_q_len": max(batch.new_lens), "max_kv_len": max(batch.kv_lens)}
        self.operands = {
            "kv_indptr": batch.kv_indptr,
            "kv_indices": indices,
            "q_indptr": indptr(batch.new_lens, indices.device) if batch.q_indptr is None else batch.q_indptr,
            "tree_mask": None if batch.tree_mask is None else batch.tree_mask.contiguous(),
            "window": batch.window,
            "workspace": attention_workspace(
                len(batch.slots),
                num_heads,
                self.kv_heads,
                self.head_dim,
                rows=num_rows,
                device=indices.device,
                **longest,
            ),
            "scale": self.head_dim**-0.5,
            **longest,
        }

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.long is None:
            return super().attend(layer, q, k, v)
        self.store(layer, k, v)
        return self.long.attend(layer, q, k, v)

    def read(self, layer: int, q: Tensor) -> Tensor:
        kv, scales = self.pool.rows(layer)
        k, v = kv.unbind(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_attention(q, k, v, out=out, **_factors(scales), **self.operands)
        return out

    @classmethod
    def alone(cls, pool: KVPool, batch: ForwardBatch, num_heads: int) -> Alone | None:
        """Of prompts from their first token on."""
        sees_itself = batch.kv_lens == batch.new_lens and is_plain(pool) and is_long(pool, batch)
        return LongChunks(pool, batch, num_heads).attend if sees_itself else None


class TritonPass(PagePass):
    """A `PagePass` by the kernel, in float32."""

    def run(self, kv: Tensor, q: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
        heads = q.flatten(1, 2)
        out = torch.empty(heads.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(heads.shape[:2], dtype=torch.float32, device=q.device)
        k, v = kv.unbind(1)
        scale = q.shape[-1] ** -0.5
        paged_attention(heads, k, v, scale=scale, out=out, lse=lse, **_factors(scales), **self._operands)
        return out.view(q.shape), lse.view(q.shape[:-1])

    @cached_property
    def _operands(self) -> dict:
        """What is the same in all layers: rows of equally wide tables and equally many queries."""
        num_rows, width = self.tables.shape
        rows = torch.arange(num_rows + 1, device=self.tables.device)
        return {
            "kv_indptr": rows * width,
            "kv_indices": self.tables.flatten(),
            "kv_lens": self.lens.contiguous(),
            "q_indptr": rows * self.num_new,
            "max_kv_len": width * self.page_size,
            "max_q_len": self.num_new,
            "page_size": self.page_size,
            "causal": self.causal,
        }


class TritonPages(PagedAttention):
    """Attention by page tables: a pass over the prefix, one over what is new, merged by their LSE."""

    pass_type = TritonPass


def _factors(scales: Tensor | None) -> dict[str, Tensor]:
    """The kernel's operands for scales ``[slots, 2]`` of a pool of 8-bit numbers."""
    return {} if scales is None else dict(zip(("k_scale", "v_scale"), scales.unbind(1), strict=True))
