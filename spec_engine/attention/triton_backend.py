"""Our Triton kernel behind the engine: by token indices, and by whole pages in passes that are merged."""

from __future__ import annotations

from functools import cache, cached_property

import torch
from torch import Tensor

from kvcanary_kernels.attention import attention_workspace, merge_passes, paged_attention
from spec_engine.attention.base import PoolAttention
from spec_engine.attention.page_pass import PagePass
from spec_engine.attention.paged import PagedAttention
from spec_engine.core import ForwardBatch, indptr

LEAST_LONG = 1024  # tokens of a row in one forward; over fewer our kernel takes no longer


class TritonAttention(PoolAttention):
    """Attention by token indices: any rows at once. Lengths are read on the device, so the host waits for nothing.

    Long chunks of prompts go to cuDNN, where there is one that is faster than our kernel: K and V are read from the
    pool by the same indices, and behind earlier chunks it takes two passes, over these and over what is new. It takes
    40 ms of the host to prepare for lengths that are new to it: so rows are alike, and chunks of a prompt equally long.
    """

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        num_rows, num_heads = len(batch.new_lens), self.kv_heads * self.fold
        self.num_long = num_rows if _is_long(batch) and _has_cudnn(self.pool.dtype, indices.device) else 0
        self.num_before = batch.kv_lens[0] - batch.new_lens[0]
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
        if self.num_long:
            return self._read_long(layer, q)
        kv, scales = self.pool.rows(layer)
        k, v = kv.unbind(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_attention(q, k, v, out=out, **_factors(scales), **self.operands)
        return out

    def _read_long(self, layer: int, q: Tensor) -> Tensor:
        """Rows of equally many queries behind equally many earlier entries."""
        kv = self.pool.load(layer, self.operands["kv_indices"])
        queries, k, v = (rows.unflatten(0, (self.num_long, -1)).transpose(1, 2) for rows in (q, *kv.unbind(1)))
        before = self.num_before
        own, lse = _pass(queries, k[:, :, before:], v[:, :, before:], causal=True)
        if not before:
            return own.transpose(1, 2).flatten(0, 1)
        earlier, earlier_lse = _pass(queries, k[:, :, :before], v[:, :, :before], causal=False)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        merge_passes(own, earlier, lse, earlier_lse, out.view(self.num_long, -1, *q.shape[1:]))
        return out


def _is_long(batch: ForwardBatch) -> bool:
    """Whether every row is a long chunk of a prompt behind others as long or none, and all rows are alike."""
    is_plain = batch.tree_mask is None and batch.window is None
    is_alike = len({*batch.new_lens}) == len({*batch.kv_lens}) == 1
    return is_plain and is_alike and batch.new_lens[0] >= LEAST_LONG and batch.kv_lens[0] % batch.new_lens[0] == 0


def _pass(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's attention of q over k, v, all ``[rows, heads, n, head_dim]``, and its LSE ``[rows, heads, n]``."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.view(out.shape[:3])


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
