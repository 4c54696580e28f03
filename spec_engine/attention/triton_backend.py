"""Our Triton kernel behind the engine: by token indices, and by whole pages in passes that are merged."""

from __future__ import annotations

from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.attention import attention_workspace, merge_passes, paged_attention
from spec_engine.attention.base import PoolAttention
from spec_engine.attention.page_pass import PagePass
from spec_engine.attention.paged import PagedAttention
from spec_engine.core import ForwardBatch, concat, indptr

LEAST_LONG = 1024  # tokens of a row in one forward, and entries before them; over fewer our kernel takes no longer


class Span(NamedTuple):
    """Rows of a forward that cuDNN attends in one call: equally many tokens, behind equally many earlier entries."""

    tokens: slice  # of the forward's
    entries: slice  # of its index array
    num_rows: int
    num_before: int  # entries of each row that earlier forwards wrote


class TritonAttention(PoolAttention):
    """Attention by token indices: any rows at once. Lengths are read on the device, so the host waits for nothing.

    Long parts of prompts go to cuDNN, where there is one that is faster than our kernel: K and V are read from the
    pool by the same indices, and behind earlier entries it takes two passes, over these and over what is new.
    """

    def plan(self, batch: ForwardBatch, indices: Tensor) -> None:
        num_rows, num_heads = len(batch.new_lens), self.kv_heads * self.fold
        self.spans = _long_spans(batch) if _has_cudnn(self.pool.dtype, indices.device) else []
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
        if self.spans:
            kv = self.pool.load(layer, self.operands["kv_indices"])
            return concat([_attend_span(span, q[span.tokens], kv[span.entries]) for span in self.spans])
        kv, scales = self.pool.rows(layer)
        k, v = kv.unbind(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_attention(q, k, v, out=out, **_factors(scales), **self.operands)
        return out


def _long_spans(batch: ForwardBatch) -> list[Span]:
    """All rows, where each has many tokens, and many entries before them or none; else nothing."""
    before = [length - new for length, new in zip(batch.kv_lens, batch.new_lens, strict=True)]
    is_long = min(batch.new_lens) >= LEAST_LONG and all(not length or length >= LEAST_LONG for length in before)
    if batch.tree_mask is not None or batch.window is not None or not is_long:
        return []
    if len({*batch.new_lens}) == len({*batch.kv_lens}) == 1:
        return [Span(slice(None), slice(None), len(before), before[0])]
    ends, kv_ends = accumulate(batch.new_lens), accumulate(batch.kv_lens)
    rows = zip(ends, batch.new_lens, kv_ends, batch.kv_lens, before, strict=True)
    return [
        Span(slice(end - new, end), slice(kv_end - length, kv_end), 1, num_before)
        for end, new, kv_end, length, num_before in rows
    ]


def _attend_span(span: Span, q: Tensor, kv: Tensor) -> Tensor:
    """The attention of q ``[n, heads, head_dim]`` over its rows' K and V ``[entries, 2, kv_heads, head_dim]``."""
    queries, k, v = (values.unflatten(0, (span.num_rows, -1)).transpose(1, 2) for values in (q, *kv.unbind(1)))
    num_before = span.num_before
    own, lse = _pass(queries, k[:, :, num_before:], v[:, :, num_before:], causal=True)
    if not num_before:
        return own.transpose(1, 2).flatten(0, 1)
    earlier, earlier_lse = _pass(queries, k[:, :, :num_before], v[:, :, :num_before], causal=False)
    out = q.new_empty(span.num_rows, *queries.shape[2:0:-1], q.shape[2])
    merge_passes(own, earlier, lse, earlier_lse, out)
    return out.flatten(0, 1)


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
