"""Pages whose elements lie in an order of the backend's own, as those of its attention on a CPU do.

There K is turned round or tiled within each block, and the tiling depends on the machine. So the order is learnt from
the backend's own store: every element of one block gets a number, and where a number turns up is where it lies. Rows
are gathered by that order, in torch: there is no kernel for it, so this is for CPUs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.hosted.cells import typed
from kvcanary.pools.views import PoolView
from kvcanary_kernels.record.rows import PoolRows

#: What the mantissa of a type tells apart, by bytes of an element and for numbers of 8 bits that are less precise.
DIGITS = {4: 1 << 7, 2: 1 << 7, 1: 1 << 3}
LESS_PRECISE, FEWER_DIGITS = "e5m2", 1 << 2


@dataclass(frozen=True, eq=False)
class PermutedRows(PoolRows):
    """Rows that are gathered element by element.

    pages: by layer, [pages, elements] of the layer's type
    order: [page_size, elements of a row] int64, where in a page each element of a row lies
    """

    pages: tuple[Tensor, ...]
    order: Tensor

    def gather(self, slots: Tensor) -> Tensor:
        return torch.stack([self.gather_layer(layer, slots) for layer in range(self.num_layers)])

    def gather_layer(self, layer: int, slots: Tensor) -> Tensor:
        return self.pages[layer][self._places(slots)].view(torch.int32)

    def scatter_layer(self, layer: int, slots: Tensor, words: Tensor) -> None:
        self.pages[layer][self._places(slots)] = words.view(self.pages[layer].dtype)

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        size = len(self.order)
        return (slots // size)[:, None], self.order[slots % size]


def permuted(view: PoolView, tensors: Sequence[Tensor], order: Tensor) -> PoolView:
    """This view, with rows that are gathered by `order` from `tensors` [pages, ...], one a layer; its K and V say what
    rows are like, and not where their elements lie.
    """
    own = {own.name: getattr(view.rows, own.name) for own in fields(PoolRows)} | {"fused": None}
    pages = tuple(tensor.view(len(tensor), -1) for tensor in tensors)
    object.__setattr__(view, "rows", PermutedRows(**own, pages=pages, order=order))
    return view


def order_of(layer: Any, heads: int, head_size: int) -> Tensor | None:
    """[page_size, elements of a row] int64 as `PermutedRows` has it; None where pages are no permutation of rows.

    The bytes of block 1 are put back as they were.
    """
    cache, store = layer.kv_cache, getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    page_size, size = cache.shape[2], 2 * heads * head_size
    count, before, kind = page_size * size, cache[1].clone(), str(getattr(layer, "kv_cache_dtype", ""))
    [numbers_of] = typed([cache], kind)
    digit = FEWER_DIGITS if LESS_PRECISE in kind else DIGITS.get(cache.element_size(), 1)
    is_dense = cache.device.type == "cpu" and cache[0].is_contiguous() and cache[0].numel() == count
    if store is None or not is_dense or not numbers_of.dtype.is_floating_point:
        return None
    numbers = torch.arange(count).view(page_size, 2, heads, head_size)
    given = cache.dtype if cache.dtype.is_floating_point else torch.bfloat16
    found, factor = torch.zeros(count, dtype=torch.int64), 1
    try:
        while factor < count:
            digits = (1 + numbers // factor % digit / digit).to(given)
            k, v = (digits[:, part].contiguous() for part in (0, 1))
            store(layer, k, v, cache, torch.arange(page_size) + page_size)
            seen = (numbers_of[1].flatten().double() - 1) * digit
            found += seen.long().clamp(0, digit - 1) * factor
            factor *= digit
    finally:
        cache[1] = before
    order = found.argsort()
    return order.view(page_size, size) if torch.equal(found[order], torch.arange(count)) else None
