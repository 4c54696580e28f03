"""Where K and V of a layer lie in vLLM's cache tensor: read off strides, then proved by letting the layer store.

Shapes cannot tell: with two KV heads the layouts of two releases have equal shapes. So a reading is believed only when
the backend's own store, given K and V that are known, changed exactly the bytes that this reading calls those slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.vllm.permuted import order_of, permuted
from kvcanary.errors import AdapterError, PlanError
from kvcanary.pools.views import PoolView

PACKED = "packed in the last axis"
PROBED_BLOCKS = 3  # beginning with block 1: nothing is alive at start-up


def pools_of(
    layers: Sequence[tuple[str, Any]], spec: Any, late: Collection[str], null_slots: int
) -> list[tuple[PoolView, list[str]]]:
    """Views of layers whose tensors are alike, with the layers' names; each storage once, `late` ones apart.

    null_slots: those of the block that nobody owns
    """
    pools: dict[tuple[Any, ...], dict[str, Any]] = {}
    seen: set[int] = set()
    for name, layer in layers:
        tensor = layer.kv_cache
        if not isinstance(tensor, torch.Tensor):
            raise AdapterError(f"layer {name} keeps a state, not K and V: it is not followed yet")
        if tensor.data_ptr() in seen:
            continue  # it shares the cache of a layer that is followed
        seen.add(tensor.data_ptr())
        key = name in late, tuple(tensor.shape), tensor.stride(), tensor.dtype
        pools.setdefault(key, {})[name] = layer
    views: list[tuple[PoolView, list[str]]] = []
    for (is_late, *_), chosen in pools.items():
        role = "draft" if is_late else "target"
        number = sum(view.name.startswith(role) for view, _ in views)
        own = getattr(spec, "kv_cache_specs", {}).get(next(iter(chosen)), spec)
        name = f"{role} {number}" if number else role
        views.append((read_layers(name, chosen, own.num_kv_heads, own.head_size, null_slots), list(chosen)))
    return views


def read_layers(name: str, layers: dict[str, Any], heads: int, head_size: int, null_slots: int) -> PoolView:
    """The view of layers whose tensors are alike, whatever pages these are cut in.

    AdapterError where no reading is the one that they store by.
    """
    first = next(iter(layers.values()))
    tried = []
    for label, view in _readings(name, layers, heads, head_size, null_slots):
        fault = probe(first, view)
        if not fault:
            return view
        tried.append(f"{label}: {fault}")
    tensor = first.kv_cache
    raise AdapterError(
        f"where K and V of {name} lie is not known, its tensor is {list(tensor.shape)} with strides {tensor.stride()}"
        f" ({'; '.join(tried) or 'no reading fits'})"
    )


@torch.inference_mode()  # as the tensors of the host may be
def probe(layer: Any, view: PoolView) -> str:
    """What speaks against this reading, after the layer has stored K and V that are known; empty: nothing.

    The bytes are put back as they were.
    """
    store = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    if store is None:
        return "its backend has no do_kv_cache_update"
    size, device = view.page_size, view.k[0].device
    blocks = slice(1, 1 + min(PROBED_BLOCKS, view.num_pages - 1))
    before = layer.kv_cache[blocks].clone()
    slots = torch.tensor([size, size + size // 2 + 1, blocks.stop * size - 1], device=device)
    generator = torch.Generator().manual_seed(1)
    shape = (len(slots), view.kv_heads, view.head_dim)
    kind = getattr(layer, "kv_cache_torch_dtype", view.dtype)
    values = [torch.randn(shape, generator=generator).to(_plain(kind)).to(device) for _ in "kv"]
    try:
        store(layer, *values, layer.kv_cache, slots)
        return _difference(layer, view, before, slots, values, blocks)
    finally:
        layer.kv_cache[blocks] = before


def _difference(layer: Any, view: PoolView, before: Tensor, slots: Tensor, values: list[Tensor], blocks: slice) -> str:
    cache = layer.kv_cache
    if values[0].dtype == view.dtype:
        wanted = torch.cat([value.flatten(1).contiguous().view(torch.int32) for value in values], 1)
        if not torch.equal(view.rows.gather_layer(0, slots), wanted):
            return "it does not show what was stored"
    after, without = cache[blocks].clone(), []
    if torch.equal(_bits(after), _bits(before)):
        return "nothing was stored"
    for state in (before, after):
        cache[blocks] = state
        zeros = torch.zeros(len(slots), view.rows.words_per_row, dtype=torch.int32, device=slots.device)
        view.rows.scatter_layer(0, slots, zeros)
        without.append(cache[blocks].clone())
    return "" if torch.equal(*map(_bits, without)) else "other bytes changed as well"


def _readings(
    name: str, layers: dict[str, Any], heads: int, head_size: int, null_slots: int
) -> Iterator[tuple[str, PoolView]]:
    tensors = [layer.kv_cache for layer in layers.values()]
    shape = tuple(tensors[0].shape)
    page_size = shape[2] if len(shape) > 2 else 0
    halves: list[tuple[str, list[Tensor], list[Tensor]]] = []
    if shape[1:] == (heads, page_size, 2 * head_size):
        halves.append((PACKED, [t[..., :head_size] for t in tensors], [t[..., head_size:] for t in tensors]))
    if shape[1:] == (2, page_size, heads, head_size):
        pairs = [(t[:, 0].transpose(1, 2), t[:, 1].transpose(1, 2)) for t in tensors]
        halves.append(("K and V beside each other", [k for k, _ in pairs], [v for _, v in pairs]))
    for label, k, v in halves:
        try:
            yield label, PoolView(name, k, v, page_size=page_size, null_slots=null_slots, layout="HND")
        except PlanError:
            continue
        order = order_of(next(iter(layers.values())), heads, head_size) if label == PACKED else None
        if order is not None:
            view = PoolView(name, k, v, page_size=page_size, null_slots=null_slots, layout="HND")
            yield "elements in an order of the backend's own", permuted(view, tensors, order)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _plain(dtype: torch.dtype) -> torch.dtype:
    """The type in which a layer is given its values."""
    return dtype if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16
