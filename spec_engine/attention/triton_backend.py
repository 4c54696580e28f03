"""Our Triton kernel behind the engine: by token indices, and by whole pages in passes that are merged."""

from __future__ import annotations

from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcanary_kernels.attention import attention_workspace, paged_attention
from spec_engine.attention.base import PoolAttention
from spec_engine.attention.page_pass import PagePass
from spec_engine.attention.paged import PagedAttention
from spec_engine.core import ForwardBatch, indptr

LEAST_WHOLE = 1024  # tokens of a prompt; over fewer our kernel takes no longer


class TritonAttention(PoolAttention):
    """Attention by token indices: any rows at once. Lengths are read on the device, so the host waits for nothing.

    Long prompts from their first token on go to cuDNN, where there is one that is faster than our kernel: their K and V
    are read from the pool by the same indices.
    """

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        num_rows, num_heads = len(batch.new_lens), self.kv_heads * self.fold
        self.num_whole = num_rows if _is_whole(batch) and _has_cudnn(self.pool.dtype, indices.device) else 0
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

    def read(self, layer: int, q: Tensor) -> Tensor:
        if self.num_whole:
            return self._read_whole(layer, q)
        kv, scales = self.pool.rows(layer)
        k, v = kv.unbind(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_attention(q, k, v, out=out, **_factors(scales), **self.operands)
        return out

    def _read_whole(self, layer: int, q: Tensor) -> Tensor:
        """Rows of equally many queries that see nothing before them."""
        k, v = self.pool.load(layer, self.operands["kv_indices"]).unbind(1)
        rows = (values.unflatten(0, (self.num_whole, -1)).transpose(1, 2) for values in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def _is_whole(batch: ForwardBatch) -> bool:
    """Whether every row is a long prompt from its first token on, all equally long."""
    is_plain = batch.tree_mask is None and batch.window is None and batch.kv_lens == batch.new_lens
    return is_plain and min(batch.new_lens) == max(batch.new_lens) >= LEAST_WHOLE


@cache
def _has_cudnn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN attends here, in 16-bit types alone."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return torch.backends.cudnn.is_available() and dtype in (torch.bfloat16, torch.float16)


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
