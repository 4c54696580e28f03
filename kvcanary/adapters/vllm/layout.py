"""Where the parts of an entry lie in vLLM's cache tensor: read off strides, then proved by letting the layer store.

Shapes cannot tell: with two KV heads the layouts of two releases have equal shapes. So a reading is believed only when
the layer's own store, given values that are known, changed exactly the bytes that this reading calls those slots, and
shows them where the type is theirs. K and V are told apart only where other values of one of them change its part
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.hosted.cells import (
    DS_BYTES,
    Reading,
    Shard,
    ds_mla,
    halves,
    index_pages,
    opaque,
    scaled_halves,
    typed,
)
from kvcanary.adapters.vllm.permuted import order_of, permuted
from kvcanary.adapters.vllm.stores import (
    KeyValueStore,
    Store,
    cache_dtype_of,
    expect_known,
    is_index,
    is_latent,
    store_of,
)
from kvcanary.errors import AdapterError, PlanError
from kvcanary.pools.views import PoolView
from kvcanary.provenance.slipped_rows import span

PACKED = "packed in the last axis"
PROBED_BLOCKS = 3  # beginning with block 1: nothing is alive at start-up


def pools_of(
    layers: Sequence[tuple[str, Any]],
    spec: Any,
    late: Collection[str],
    null_slots: int,
    shard: Callable[[bool], Shard | None] = lambda is_late: None,
) -> list[tuple[PoolView, list[str]]]:
    """Views of layers whose tensors are alike, with the layers' names; each storage once, `late` ones apart.

    null_slots: those of the block that nobody owns;  shard: of late layers, or of the others; None: they are whole
    """
    pools: dict[tuple[Any, ...], dict[str, Any]] = {}
    seen: set[int] = set()
    specs = getattr(spec, "kv_cache_specs", {})
    for name, layer in layers:
        own = specs.get(name, spec)
        expect_known(name, layer, own)
        tensor = layer.kv_cache
        if tensor.data_ptr() in seen:
            continue  # it shares the cache of a layer that is followed
        seen.add(tensor.data_ptr())
        kind = type(layer), cache_dtype_of(layer), is_index(layer, own)
        key = name in late, tuple(tensor.shape), tensor.stride(), tensor.dtype, *kind
        pools.setdefault(key, {})[name] = layer
    views: list[tuple[PoolView, list[str]]] = []
    for (is_late, *_), chosen in pools.items():
        role = "draft" if is_late else "target"
        number = sum(view.name.startswith(role) for view, _ in views)
        own = specs.get(next(iter(chosen)), spec)
        name = f"{role} {number}" if number else role
        views.append((read_layers(name, chosen, own, null_slots, shard(is_late)), list(chosen)))
    return views


def read_layers(name: str, layers: dict[str, Any], spec: Any, null_slots: int, shard: Shard | None = None) -> PoolView:
    """The view of layers whose tensors are alike, whatever pages these are cut in; `spec`: of each.

    AdapterError where no reading is the one that they store by.
    """
    first = next(iter(layers.values()))
    store, tensors, tried = store_of(first, spec), [layer.kv_cache for layer in layers.values()], []
    is_whole = is_latent(first) or is_index(first, spec)
    heads = (0, 0) if shard is None else shard.heads(getattr(spec, "num_kv_heads", 0), is_whole)
    for label, view in _views(name, tensors, first, spec, store, null_slots, heads):
        fault = probe(first, view, store)
        if not fault:
            return view
        tried.append(f"{label}: {fault}")
    tensor = first.kv_cache
    raise AdapterError(
        f"where K and V of {name} lie is not known, its tensor is {list(tensor.shape)} with strides {tensor.stride()}"
        f" ({'; '.join(tried) or 'no reading fits'})"
    )


@torch.inference_mode()  # as the tensors of the host may be
def probe(layer: Any, view: PoolView, store: Store | None) -> str:
    """What speaks against this reading, after the layer has stored values that are known; empty: nothing.

    The bytes are put back as they were.
    """
    if store is None:
        return "its backend has no do_kv_cache_update"
    size, device = view.page_size, view.k[0].device
    blocks = slice(1, 1 + min(PROBED_BLOCKS, view.num_pages - 1))
    held = layer.kv_cache[blocks].clone()
    slots = torch.tensor([size, size + size // 2 + 1, blocks.stop * size - 1], device=device)
    kind = _plain(getattr(layer, "kv_cache_torch_dtype", layer.kv_cache.dtype))
    once, again = ([value.to(kind).to(device) for value in _drawn(store, len(slots), seed)] for seed in (1, 2))
    try:
        store(again, slots)  # a first call may set up what it stores beside
        before = layer.kv_cache[blocks].clone()
        store(once, slots)
        return _difference(layer, view, before, slots, once, blocks) or _mixed_up(view, slots, store, once, again)
    except Exception as error:  # of a backend that was not made for such values
        return f"its store failed, {type(error).__name__}: {error}"
    finally:
        layer.kv_cache[blocks] = held


def _drawn(store: Store, n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((n, *shape), generator=generator) for shape in store.shapes]


def _difference(layer: Any, view: PoolView, before: Tensor, slots: Tensor, values: list[Tensor], blocks: slice) -> str:
    cache = layer.kv_cache
    if _is_as_given(view, cache, values):
        flat = [torch.cat(values, -1)] if not view.v else values
        wanted = torch.cat([value.flatten(1).contiguous().view(torch.int32) for value in flat], 1)
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


def _is_as_given(view: PoolView, cache: Tensor, values: list[Tensor]) -> bool:
    """Whether a row of the view is the values that it was made of, bit for bit."""
    size = sum(value[0].numel() * value.element_size() for value in values)
    return values[0].dtype == cache.dtype and size == 4 * view.rows.words_per_row


def _mixed_up(view: PoolView, slots: Tensor, store: Store, once: list[Tensor], again: list[Tensor]) -> str:
    """Whether K and V are not the parts that the reading calls so: other values of one change its own bytes alone."""
    if not view.v:
        return ""
    for number, name in enumerate("KV"):
        rows = []
        for values in (once, [again[n] if n == number else value for n, value in enumerate(once)]):
            store(values, slots)
            rows.append(view.rows.gather_layer(0, slots))
        changed = (rows[0] != rows[1]).any(0)
        parts = zip(view.parts, view.rows.pieces, strict=True)
        own = torch.zeros_like(changed)
        for part, piece in parts:
            own[span(piece)] = part.name.startswith(name)
        if not bool(changed.any()) or bool((changed & ~own).any()):
            return f"other values of {name} change other bytes than its own"
    return ""


def _views(
    name: str,
    tensors: list[Tensor],
    layer: Any,
    spec: Any,
    store: Store | None,
    null_slots: int,
    heads: tuple[int, int],
) -> Iterator[tuple[str, PoolView]]:
    """What the tensors may mean, the most telling reading first; cells that nothing else explains are one part."""
    shape = tuple(tensors[0].shape)
    page_size = shape[-2] if len(shape) < 5 else shape[2]
    for reading in _readings(tensors, page_size, layer, spec, store):
        try:
            view = reading.view(name, page_size, null_slots, heads=heads)
        except (PlanError, RuntimeError):
            continue
        yield reading.label, view
        if reading.label == PACKED and isinstance(store, KeyValueStore):
            order = order_of(layer, *store.shapes[0])
            if order is not None:
                view = reading.view(name, page_size, null_slots, heads=heads)
                yield "elements in an order of the backend's own", permuted(view, tensors, order)


def _readings(tensors: list[Tensor], page_size: int, layer: Any, spec: Any, store: Store | None) -> Iterator[Reading]:
    kind, cell = cache_dtype_of(layer), tensors[0].shape[-1]
    if is_index(layer, spec):
        yield index_pages(tensors, page_size)
        return
    if tensors[0].dim() == 3 and is_latent(layer):  # as MLA layers are bound, without an axis of heads
        tensors = [tensor.unsqueeze(1) for tensor in tensors]
    numbers = typed(tensors, kind)
    if kind == "fp8_ds_mla" and cell == DS_BYTES:
        yield ds_mla(tensors)
    elif isinstance(store, KeyValueStore):
        (heads, size), (_, size_v) = store.shapes
        if kind.endswith("_per_token_head"):
            yield scaled_halves(tensors)
        if tensors[0].shape[1:] == (heads, page_size, size + size_v):
            yield halves(numbers, size, PACKED)
        if tensors[0].shape[1:] == (2, page_size, heads, size):
            pairs = [(t[:, 0].transpose(1, 2), t[:, 1].transpose(1, 2)) for t in numbers]
            yield Reading("K and V beside each other", [k for k, _ in pairs], [v for _, v in pairs])
    if tensors[0].dim() == 4:
        is_whole = is_latent(layer) and kind != "fp8_ds_mla"
        yield opaque(numbers if is_whole else tensors)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _plain(dtype: torch.dtype) -> torch.dtype:
    """The type in which a layer is given its values."""
    return dtype if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16
