"""Pools of every layout, with the memory of each part in one order, and the truth taken from what lies there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcanary import PoolView
from kvcanary.pools.parts import Part
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import CONTENT_B, LAYERS_LOW
from kvcanary_kernels.record.seal import seal_torch

LAYOUTS = (
    "nhd",  # [slots, heads, dim], as all that follow each layer for itself
    "nhd_fused",  # [slots, 2, heads, dim]
    "nhd_paged",  # [pages, 2, page_size, heads, dim]
    "hnd",  # [pages, heads, page_size, dim]
    "hnd_fused",  # [pages, 2, heads, page_size, dim]
    "hnd_sides",  # [pages, heads, page_size, 2, dim]
    "wide_k",  # heads of K are longer than those of V
    "nhd_scales",  # K and V with a float32 scale a head each
    "hnd_scales",
    "latent",  # [slots, 1, dim], no V
    "latent_paged",  # [pages, page_size, 1, dim]
    "latent_index",  # latent with index keys
)
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass
class FakePool:
    """A pool of any layout.

    kv:    [layers, slots, 2, heads, dim]: all bytes, where `layout` is "stacked"
    parts: by name and layer, the same memory as [pages, page_size, heads, dim] integers of the element's size
    """

    view: PoolView
    kv: Tensor | None = None
    parts: dict[str, list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = {part.name: [self._in_order(t, part) for t in part.tensors] for part in self.view.parts}

    def bits(self, layer: int, slot: int, part: str, head: int = 0) -> Tensor:
        """The element bits of one head of one row, as a writable integer view."""
        return self.parts[part][layer][(*divmod(slot, self.view.page_size), head)]

    def put(self, layer: int, slots: Tensor, values: Sequence[Tensor]) -> None:
        """Write one layer's values [n, ...], by part."""
        for part, value in zip(self.parts.values(), values, strict=True):
            rows = part[layer]
            rows[self._places(slots)] = value.contiguous().view(rows.dtype).reshape(-1, *rows.shape[2:])

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy rows in all layers; every source is read before any destination is written."""
        for rows in itertools.chain(*self.parts.values()):
            rows[self._places(dst)] = rows[self._places(src)]

    def fill(self, generator: torch.Generator, most: int = 0xFF) -> None:
        """Random bytes everywhere, NaNs and infinities among them; none where bytes are at most 0x3F."""
        for rows in itertools.chain(*self.parts.values()):
            data = torch.randint(
                0, most + 1, (rows.numel() * rows.element_size(),), dtype=torch.uint8, generator=generator
            )
            rows.copy_(data.view(rows.dtype).view(rows.shape))

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots // self.view.page_size, slots % self.view.page_size

    def _in_order(self, tensor: Tensor, part: Part) -> Tensor:
        if self.view.layout == "HND":
            tensor = tensor.transpose(1, 2)
        elif self.view.k[0].dim() == 3:
            tensor = tensor.unflatten(0, (-1, self.view.page_size))
        if len(part.shape) == 1:
            tensor = tensor.unsqueeze(-1)
        return tensor.view(BITS[tensor.element_size()])


def make_fake_pool(
    layout: str,
    *,
    name: str = "target",
    layers: int = 2,
    num_pages: int = 3,
    page_size: int = 4,
    heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    **view: object,
) -> FakePool:
    """A pool of zeros in one of LAYOUTS, or "stacked"."""
    slots = num_pages * page_size
    if layout == "stacked":
        kv = torch.zeros(layers, slots, 2, heads, dim, dtype=dtype)
        k, v = (tuple(kv[layer, :, part] for layer in range(layers)) for part in (0, 1))
        return FakePool(PoolView(name, k, v, page_size, **view), kv)
    shapes = num_pages, page_size, heads, dim
    made = [_layer(layout, *shapes, dtype) for _ in range(layers)]
    k, v = ([layer[part] for layer in made] for part in ("k", "v"))
    extras = {extra: [layer[extra] for layer in made] for extra in made[0] if extra not in ("k", "v")}
    letters = "HND" if layout.startswith("hnd") else "NHD"
    v = None if v[0] is None else v
    return FakePool(PoolView(name, k, v, page_size, layout=letters, extras=extras, **view))


def _layer(layout: str, pages: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """K, V and extras of one layer."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def pair(kv: Tensor, place: int) -> dict[str, Tensor | None]:
        return {"k": kv.select(place, 0), "v": kv.select(place, 1)}

    def scales(*shape: int) -> dict[str, Tensor | None]:
        return {name: torch.zeros(shape, dtype=torch.float32) for name in ("k_scale", "v_scale")}

    slots, by_head = (pages * size, heads, dim), (pages, heads, size, dim)
    match layout:
        case "nhd" | "nhd_scales":
            layer = {"k": zeros(*slots), "v": zeros(*slots)}
            return layer | scales(*slots[:2]) if layout == "nhd_scales" else layer
        case "nhd_fused":
            return pair(zeros(slots[0], 2, heads, dim), 1)
        case "nhd_paged":
            return pair(zeros(pages, 2, size, heads, dim), 1)
        case "hnd" | "hnd_scales":
            layer = {"k": zeros(*by_head), "v": zeros(*by_head)}
            return layer | scales(*by_head[:3]) if layout == "hnd_scales" else layer
        case "hnd_fused":
            return pair(zeros(pages, 2, heads, size, dim), 1)
        case "hnd_sides":
            return pair(zeros(pages, heads, size, 2, dim), 3)
        case "wide_k":
            return {"k": zeros(*slots[:2], 2 * dim), "v": zeros(*slots)}
        case "latent":
            return {"k": zeros(slots[0], 1, dim), "v": None}
        case "latent_paged":
            return {"k": zeros(pages, size, 1, dim), "v": None}
        case "latent_index":
            return {"k": zeros(slots[0], 1, dim), "v": None, "index_key": zeros(slots[0], 1, dim)}
    raise ValueError(layout)


def seal_pool(pool: PoolState) -> None:
    """Take the bytes of all slots as they are for the truth, written by all layers."""
    slots = torch.arange(pool.view.num_slots)
    one = torch.ones_like(slots)
    identity = dict.fromkeys(("tokens", "chains", "requests", "generations", "step", "sites"), one)
    seal_torch(pool.records, slots, positions=slots, **identity, pool_id=pool.pool_id, keys=pool.keys)
    fingerprint_a, fingerprint_b = fingerprints_of_slots(pool, slots)
    pool.content_a.copy_(fingerprint_a)
    pool.records[:, CONTENT_B] = fingerprint_b
    pool.records[:, LAYERS_LOW] = (1 << pool.view.num_layers) - 1
