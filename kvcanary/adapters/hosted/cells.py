"""Cells: what the bytes of one entry are in the caches of engines, where they need not be K and V of equal size.

Each reading takes the tensors of layers that are alike, whose last axis is the cell, and gives views of their parts.
They are the same in vLLM and in SGLang, whose kernels store them. Nothing is copied: parts are views by strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary.pools.views import PoolView

#: Of a cell of `fp8_ds_mla`, in bytes: 512 numbers of 8 bits, the scale of each 128 of them, 64 numbers of 16 bits.
DS_LATENT, DS_SCALES, DS_BYTES = 512, 528, 656
SCALE_BYTES = 4
INDEX_BLOCK = 128  # numbers of an index key that have one scale


class Shard(NamedTuple):
    """What a worker has of layers that are cut over several: rank, how many these are, KV heads of the whole layer."""

    rank: int
    num_ranks: int
    kv_heads: int

    def heads(self, own: int, is_whole: bool) -> tuple[int, int]:
        """Where each KV head is held by several, the number of this worker's, and how many there are; else zeros.

        own: KV heads that a layer has here;  is_whole: its cells have none, and are the same everywhere
        """
        if is_whole:
            return 0, 1
        has_one = self.kv_heads < self.num_ranks and own == 1
        return (self.rank * self.kv_heads // self.num_ranks, self.kv_heads) if has_one else (0, 0)


@dataclass(frozen=True)
class Reading:
    """Parts of a cell, each one tensor a layer. v empty: K stands for all that is no extra."""

    label: str
    k: Sequence[Tensor]
    v: Sequence[Tensor] = ()
    extras: dict[str, list[Tensor]] = field(default_factory=dict)

    def view(
        self, name: str, page_size: int, null_slots: int, layout: str = "HND", heads: tuple[int, int] = (0, 0)
    ) -> PoolView:
        """heads: `first_head` and `whole_heads` of the view. PlanError where cells are no whole, aligned words."""
        first, whole = heads
        return PoolView(
            name, self.k, self.v, page_size=page_size, null_slots=null_slots, layout=layout, extras=self.extras,
            first_head=first, whole_heads=whole,
        )  # fmt: skip


def opaque(tensors: Sequence[Tensor]) -> Reading:
    """The whole cell is one part: latent rows (MLA), or whatever a backend packs."""
    return Reading("one part a cell", list(tensors))


def halves(tensors: Sequence[Tensor], size: int, label: str) -> Reading:
    """The first `size` elements are K, the others V, of which there may be fewer or more."""
    return Reading(label, [t[..., :size] for t in tensors], [t[..., size:] for t in tensors])


def scaled_halves(tensors: Sequence[Tensor]) -> Reading:
    """K, its float32 scale, V, its scale: a scale for each token and head."""
    half, pad = tensors[0].shape[-1] // 2, SCALE_BYTES // tensors[0].element_size()
    size = half - pad

    def scales(first: int) -> list[Tensor]:
        return [t[..., first : first + pad].view(torch.float32)[..., 0] for t in tensors]

    k, v = ([t[..., first : first + size] for t in tensors] for first in (0, half))
    return Reading("scales beside K and V", k, v, {"K scale": scales(size), "V scale": scales(half + size)})


def ds_mla(tensors: Sequence[Tensor]) -> Reading:
    """`fp8_ds_mla`: the latent vector in fp8 with its scales, and the rotated part as it is."""
    k = [t[..., :DS_LATENT].view(torch.float8_e4m3fn) for t in tensors]
    scales = [t[..., DS_LATENT:DS_SCALES].view(torch.float32) for t in tensors]
    rope = [t[..., DS_SCALES:DS_BYTES].view(torch.bfloat16) for t in tensors]
    return Reading("fp8_ds_mla", k, (), {"scales": scales, "rope": rope})


def index_pages(tensors: Sequence[Tensor], page_size: int) -> Reading:
    """Keys of a sparse index, [pages, ...] bytes: of each page first all numbers, then all float32 scales."""
    cell = tensors[0][0].numel() // page_size
    scales = -(-cell // (INDEX_BLOCK + SCALE_BYTES))
    size = cell - scales * SCALE_BYTES
    k, beside = [], []
    for tensor in tensors:
        pages, step, first = len(tensor), tensor.stride(0), tensor.storage_offset()
        numbers = tensor.as_strided((pages, 1, page_size, size), (step, page_size * size, size, 1), first)
        k.append(numbers.view(torch.float8_e4m3fn))
        behind = tensor.as_strided((pages, page_size * scales * SCALE_BYTES), (step, 1), first + page_size * size)
        beside.append(behind.view(torch.float32).unflatten(1, (1, page_size, scales)))
    return Reading("an index: numbers, then scales", k, (), {"scales": beside})


def typed(tensors: Sequence[Tensor], cache_dtype: str) -> list[Tensor]:
    """The same bytes in the type that an engine's setting names, so that a number that is not finite can be told."""
    kind = torch.float8_e5m2 if "e5m2" in cache_dtype else torch.float8_e4m3fn
    is_fp8 = cache_dtype.startswith("fp8") and tensors[0].dtype is torch.uint8 and torch.version.hip is None
    return [t.view(kind) for t in tensors] if is_fp8 else list(tensors)
