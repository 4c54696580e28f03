"""Paged attention: queries of ragged rows over the keys and values that each row's slots or pages name."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from kvcanary_kernels.content.reads import ReadSums
from kvcanary_kernels.engine.attention.checks import (
    FLOATS,
    POOL_FLOATS,
    expect_mask,
    expect_reads,
    expect_rows,
    expect_scales,
)
from kvcanary_kernels.engine.attention.launch import launch, scratch_size, tiles_of
from kvcanary_kernels.record.arguments import expect_int64


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    q_indptr: Tensor,
    max_kv_len: int,
    max_q_len: int,
    scale: float,
    out: Tensor,
    tree_mask: Tensor | None = None,
    page_size: int = 1,
    window: int | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    workspace: Tensor | None = None,
    kv_lens: Tensor | None = None,
    causal: bool = True,
    lse: Tensor | None = None,
    reads: ReadSums | None = None,
    launches: bool = True,
) -> None:
    """Softmax attention of each row's queries over its keys, in float32. May be captured, if given a workspace.

    Row r owns queries [q_indptr[r], q_indptr[r + 1]) and reads the pages kv_indices[kv_indptr[r]:kv_indptr[r + 1]] in
    order, slot by slot. Its last keys are its queries' own: query i sees all keys before these, and of them those up to
    its own. Rows without queries, and queries of no row, write nothing; a query that sees nothing gets zeros.

    q, out:     [n, heads, dim], dim 64 or 128 or any other, each bf16, fp16 or fp32; dense heads, any other strides
    k, v:       [slots, kv_heads, dim] of one layer, as q or float8_e4m3fn; dense heads, any other strides
    kv_indptr:  [rows + 1] int64;  q_indptr: [rows + 1] int64
    kv_indices: [any] int64 pages, with page_size 1 slots; what is no page of the pool is read as the null page 0
    max_kv_len: keys of the longest row;  max_q_len: queries of the longest row: they shape the grid, lengths are read
                on the device
    scale:      factor of all scores
    tree_mask:  [rows, N, N] bool, N >= max_q_len: which of the new keys each query sees; None: those up to its own
    window:     keys that a query sees, itself included, along its own path of the tree; None: all
    k_scale, v_scale: factors of the pool's numbers, a float or a tensor of one fp32; or [slots] fp32 of any stride, one
                for each slot: the product is rounded to the type of q; None: 1
    workspace:  [>= attention_workspace(...)] fp32 scratch; None: allocated here
    kv_lens:    [rows] int64, keys of each row where its last page is not full; None: whole pages
    causal:     False: the keys are none of the queries' own, all see all
    lse:        [n, heads] out, natural logarithm of each sum of exponents, -inf where nothing is seen; None: not wanted
    reads:      by which the bytes of K and V are fingerprinted as they are read, without a window; None: nobody asks.
                Entry j of row r, wherever it lies, adds to reads.sums[kv_indptr[r] * page_size + j], once for each row
                that has queries
    """
    operands = locals()
    num_rows = q_indptr.numel() - 1
    expect_int64(num_rows + 1, q_indptr=q_indptr, kv_indptr=kv_indptr)
    expect_int64(kv_indices.numel(), kv_indices=kv_indices)
    expect_int64(num_rows, kv_lens=kv_lens)
    expect_rows("q", q, (None, None, None), FLOATS)
    expect_rows("out", out, tuple(q.shape), FLOATS)
    expect_rows("k", k, (None, None, q.shape[2]), POOL_FLOATS)
    expect_rows("v", v, tuple(k.shape), (k.dtype,))
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of the {k.shape[1]} KV heads, got {q.shape[1]}")
    if page_size < 1 or k.shape[0] % page_size:
        raise ValueError(f"page_size must divide the pool's {k.shape[0]} slots, got {page_size}")
    if window is not None and window < 1:
        raise ValueError(f"window must be positive or None, got {window}")
    if tree_mask is not None:
        expect_mask(tree_mask, num_rows, max_q_len, causal)
    expect_scales(k.shape[0], k_scale=k_scale, v_scale=v_scale)
    if reads is not None:
        expect_reads(reads, k, kv_indices.numel() * page_size, window, k_scale, v_scale)
    if lse is not None and (lse.shape != q.shape[:2] or not lse.is_floating_point() or not lse.is_contiguous()):
        raise ValueError(f"lse must be contiguous {list(q.shape[:2])} of floats, got {list(lse.shape)} {lse.dtype}")
    if launches and q.dtype is torch.float64:
        raise ValueError("the kernel takes bf16, fp16 or fp32 queries, got torch.float64: use paged_attention_torch")
    if num_rows == 0 or q.shape[0] == 0:
        return
    if launches:
        tiles = tiles_of(num_rows, q.shape[1], k.shape[1], max_q_len, max_kv_len, q.device)
        size = scratch_size(tiles, *q.shape)
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.float32, device=q.device)
        if workspace.numel() < size or workspace.dtype is not torch.float32:
            raise ValueError(
                f"workspace must hold {size} fp32 numbers, got {workspace.numel()} of {workspace.dtype}: "
                "make it with attention_workspace"
            )
        launch(tiles, workspace, **operands)
        return
    exact = torch.promote_types(q.dtype, torch.float32)
    heads = (k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    for row, (first, end) in enumerate(pairwise(q_indptr.tolist())):
        if first == end:
            continue
        slots = _slots(row, kv_indptr, kv_indices, kv_lens, page_size, len(k))
        if reads is not None:
            place = min(max(int(kv_indptr[row]), 0), len(kv_indices)) * page_size
            reads.add_torch(slice(place, place + len(slots)), slots)
        seen = _visible(end - first, len(slots), None if tree_mask is None else tree_mask[row], causal, window)
        seen = seen.to(q.device)
        queries = q[first:end].to(exact).unflatten(1, heads[:2])  # [n, kv_heads, fold, dim]
        scores = torch.einsum("nhfd,lhd->hfnl", queries, _scaled(k[slots].to(exact), k_scale, slots)) * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        sums = torch.logsumexp(scores, -1)  # -inf where nothing is seen
        weights = torch.exp(scores - sums.clamp_min(torch.finfo(exact).min)[..., None])
        values = torch.einsum("hfnl,lhd->nhfd", weights, _scaled(v[slots].to(exact), v_scale, slots))
        out[first:end] = values.flatten(1, 2)
        if lse is not None:
            lse[first:end] = sums.flatten(0, 1).T


paged_attention_torch = partial(paged_attention, launches=False)


def attention_workspace(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rows: int,
    max_q_len: int,
    max_kv_len: int,
    device: torch.device | str,
) -> Tensor:
    """Scratch for `paged_attention` of q [num_tokens, num_heads, head_dim] in so many ``rows``, within these bounds.

    A call of fewer rows may split their keys more often and need more: each size has its own, or all the largest.
    """
    device = torch.device(device)
    tiles = tiles_of(rows, num_heads, num_kv_heads, max_q_len, max_kv_len, device)
    size = scratch_size(tiles, num_tokens, num_heads, head_dim)
    return torch.empty(size, dtype=torch.float32, device=device)


def _slots(
    row: int, kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor | None, page_size: int, num_slots: int
) -> Tensor:
    """The slots of one row's keys in order; what is no slot of the pool becomes one of the null page."""
    first, end = (min(max(place, 0), len(kv_indices)) for place in kv_indptr[row : row + 2].tolist())
    pages = kv_indices[first:end]
    pages = torch.where((pages >= 0) & (pages < num_slots // page_size), pages, 0)
    slots = (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()
    return slots if kv_lens is None else slots[: max(int(kv_lens[row]), 0)]


def _visible(num_new: int, num_keys: int, mask: Tensor | None, causal: bool, window: int | None) -> Tensor:
    """[num_new, num_keys] bool: which keys each query sees."""
    if not causal:
        return torch.ones(num_new, num_keys, dtype=torch.bool)
    column = torch.arange(num_keys) - (num_keys - num_new)  # place among the new tokens; negative: before them
    if mask is None:
        own = torch.ones(num_new, num_new, dtype=torch.bool).tril()
    else:
        own = mask[:num_new, :num_new].cpu()
    depths = own.sum(-1) - 1
    seen = (column < 0) | own[:, column.clamp_min(0)]
    if window is None:
        return seen
    place = torch.where(column < 0, column, depths[column.clamp_min(0)])
    return seen & (place > depths[:, None] - window)


def _scaled(values: Tensor, scale: float | Tensor | None, slots: Tensor) -> Tensor:
    if isinstance(scale, Tensor) and scale.numel() > 1:
        scale = scale[slots, None, None]
    return values if scale is None else values * scale
