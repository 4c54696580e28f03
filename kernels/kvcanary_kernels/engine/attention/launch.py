"""How paged attention is cut into programs: tiles of queries, splits of keys, and the scratch that splits need."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.content.reads import ReadSums
from kvcanary_kernels.engine.attention.kernels import _attend_kernel, _merge_kernel
from kvcanary_kernels.record.device import num_units, triton
from kvcanary_kernels.record.overlap import overlap_options

ROWS_PER_UNIT = 64  # of tiles that a multiprocessor should find, where keys can be split
SPLIT_KEYS = 128  # fewer are not worth a split
MOST_SPLITS = 64


class Tiles(NamedTuple):
    """The static shape of a launch; sizes of kernels are powers of two."""

    block_m: int  # queries times heads of one KV head that a program holds
    num_tiles: int  # of the longest row
    num_splits: int  # parts that share a tile's keys


def tiles_of(
    num_rows: int, num_heads: int, num_kv_heads: int, max_q_len: int, max_kv_len: int, device: torch.device
) -> Tiles:
    """Enough programs to fill the device, and no split so short that its program only starts and ends."""
    queries = max(max_q_len, 1) * (num_heads // num_kv_heads)
    block_m = min(max(_power_of_two(queries), 16), 128)
    num_tiles = triton.cdiv(queries, block_m)
    programs = max(ROWS_PER_UNIT // block_m, 1) * num_units(device)
    wanted = programs // (num_rows * num_kv_heads * num_tiles)
    return Tiles(block_m, num_tiles, max(min(wanted, max_kv_len // SPLIT_KEYS, MOST_SPLITS), 1))


def scratch_size(tiles: Tiles, num_tokens: int, num_heads: int, head_dim: int) -> int:
    """fp32 numbers: output and LSE of every split, query and head; none where nothing is split."""
    return 0 if tiles.num_splits == 1 else tiles.num_splits * num_tokens * num_heads * (head_dim + 1)


def launch(
    tiles: Tiles,
    scratch: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor | None,
    q_indptr: Tensor,
    tree_mask: Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    page_size: int,
    window: int | None,
    causal: bool,
    max_kv_len: int,
    reads: ReadSums | None,
    **others: object,
) -> None:
    """Both kernels over checked operands; ``scratch`` holds at least `scratch_size` numbers; others shape none."""
    n, num_heads, dim = q.shape
    num_rows, kv_heads = q_indptr.numel() - 1, k.shape[1]
    nodes = 0 if tree_mask is None else tree_mask.shape[1]
    _attend_kernel[(kv_heads, tiles.num_tiles * tiles.num_splits, num_rows)](
        q,
        k,
        v,
        kv_indptr,
        kv_indices,
        kv_indptr if kv_lens is None else kv_lens,
        q_indptr,
        q_indptr if tree_mask is None else tree_mask.view(torch.uint8),
        k_scale if isinstance(k_scale, Tensor) else scratch,
        v_scale if isinstance(v_scale, Tensor) else scratch,
        out,
        scratch if lse is None else lse,
        scratch,
        scratch if reads is None else reads.factors,
        scratch if reads is None else reads.missing,
        scratch if reads is None else reads.scale_keys,
        scratch if reads is None else reads.sums,
        scale * _number(k_scale),
        _number(v_scale),
        n,
        k.shape[0],
        kv_indices.numel(),
        tiles.num_splits,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        _slot_stride(k_scale),
        _slot_stride(v_scale),
        *out.stride()[:2],
        HEADS=kv_heads,
        FOLD=num_heads // kv_heads,
        DIM=dim,
        BLOCK_D=max(_power_of_two(dim), 16),
        BLOCK_M=tiles.block_m,
        PAGE=page_size,
        NODES=nodes,
        BLOCK_NODES=_power_of_two(max(nodes, 1)),
        WINDOW=window or 0,
        CAUSAL=causal,
        HAS_SPLITS=tiles.num_splits > 1,
        HAS_LENS=kv_lens is not None,
        HAS_LSE=lse is not None,
        HAS_K_SCALE=isinstance(k_scale, Tensor) and k_scale.numel() == 1,
        HAS_V_SCALE=isinstance(v_scale, Tensor) and v_scale.numel() == 1,
        K_PER_SLOT=isinstance(k_scale, Tensor) and k_scale.numel() > 1,
        V_PER_SLOT=isinstance(v_scale, Tensor) and v_scale.numel() > 1,
        ITEM=k.element_size(),
        HASHES=reads is not None,
        PACKED=q.is_cuda,
        HAS_SCALE_KEYS=reads is not None and reads.scale_keys.numel() > 0,
        **_schedule(tiles, dim, q.element_size(), max_kv_len, reads is not None),
        **overlap_options(q.device),
    )
    if tiles.num_splits == 1:
        return
    _merge_kernel[(n, num_heads)](
        scratch,
        q_indptr,
        out,
        scratch if lse is None else lse,
        n,
        num_rows,
        tiles.num_splits,
        *out.stride()[:2],
        HEADS=num_heads,
        DIM=dim,
        BLOCK_D=max(_power_of_two(dim), 16),
        BLOCK_S=_power_of_two(tiles.num_splits),
        HAS_LSE=lse is not None,
        **overlap_options(q.device),
    )


def _schedule(tiles: Tiles, dim: int, element_size: int, max_kv_len: int, hashes: bool) -> dict[str, Any]:
    """Keys a program takes at a time, its warps, and how many blocks of keys are on their way at once."""
    block_m = tiles.block_m
    if element_size == 4:  # exact products take no tensor core, and twice the room
        return {"BLOCK_N": 32, "num_warps": 4 if block_m < 64 else 8, "num_stages": 2}
    if block_m < 64 and dim <= 128 and max_kv_len <= 2 * SPLIT_KEYS * tiles.num_splits:  # a block or two, at once
        return {"BLOCK_N": SPLIT_KEYS, "num_warps": 4, "num_stages": 2}
    if block_m < 64 and hashes:  # factors of keys are read for every block
        return {"BLOCK_N": SPLIT_KEYS, "num_warps": 4, "num_stages": 3}
    if block_m < 64:
        return {"BLOCK_N": 64, "num_warps": 2, "num_stages": 3}
    block_n = block_m if dim <= 128 else 32
    return {"BLOCK_N": block_n, "num_warps": block_m // 16, "num_stages": 3}


def _number(scale: float | Tensor | None) -> float:
    """The factor that the host knows."""
    return 1.0 if scale is None or isinstance(scale, Tensor) else scale


def _slot_stride(scale: float | Tensor | None) -> int:
    """From one slot's scale to the next; 0 where there is one for all."""
    return scale.stride(0) if isinstance(scale, Tensor) and scale.numel() > 1 else 0


def _power_of_two(size: int) -> int:
    """The least one that is not below ``size``."""
    return 1 << (size - 1).bit_length()
