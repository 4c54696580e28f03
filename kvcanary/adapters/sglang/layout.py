"""Where K and V lie in a memory pool of SGLang: read by the class of the pool, then proved by letting it store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.hosted.cells import Shard
from kvcanary.errors import AdapterError
from kvcanary.pools.views import PoolView

REMEDY = "unset KVCANARY_MODE to serve without a canary"
#: Classes of pools that are known and not followed, with what stands against it; others are not known.
NOT_FOLLOWED = {
    "MHATokenToKVPoolFP4": "two elements share a byte, and their scales lie in pages",
    "MLATokenToKVPoolFP4": "two elements share a byte, and their scales lie in pages",
    "MHATokenToKVPoolMXFP8": "the scales of its blocks lie beside it, in an order that its page size decides",
    "DSATokenToKVPool": "index keys lie in pages beside the latent rows",
    "NoOpMHATokenToKVPool": "it keeps nothing",
}


@dataclass(frozen=True)
class Part:
    """Layers that share slots: their view, and what they are called.

    window:   tokens that attention over them sees, the reader's own included; 0: all
    slot_map: [slots that rows name] int64, SGLang's own: where these layers keep each; None: there
    """

    view: PoolView
    names: tuple[str, ...]
    window: int = 0
    slot_map: Tensor | None = None


def parts_of(
    pool: Any, role: str, token_offset: int = 0, window: int | None = None, shard: Shard | None = None
) -> list[Part]:
    """Every part of this pool. AdapterError where its layout is not known, or is not the one that it stores by.

    window: how far back attention of windowed layers looks, as the model runner has it
    shard:  what this rank has of each layer; None: all
    """
    kind = type(pool).__name__
    if kind not in READERS:
        raise _not_followed(kind)
    try:
        return READERS[kind](pool, role, token_offset, window, shard)
    except AttributeError as error:
        raise AdapterError(f"a pool of class {kind} is not as known: {error}; {REMEDY}") from error


def _plain(
    pool: Any,
    role: str,
    token_offset: int,
    window: int | None = None,
    shard: Shard | None = None,
    layers: Iterable[int] | None = None,
) -> list[Part]:
    """A pool that lies alone; layers: their numbers in the model, where the pool counts its own."""
    order = getattr(pool, "kv_cache_layout", "nhd")
    if order not in ("nhd", "hnd"):
        raise AdapterError(f"pools whose rows lie as {order!r} are not followed, only 'nhd' and 'hnd'; {REMEDY}")
    layout = "HND" if getattr(pool, "use_hnd", False) and order == "hnd" else "NHD"
    k, *v = _typed(pool)
    first, whole = (0, 0) if shard is None else shard.heads(k[0].shape[-3 if layout == "HND" else -2], not v)
    view = PoolView(
        role, k, v[0] if v else None, page_size=pool.page_size, layout=layout, token_offset=token_offset,
        first_head=first, whole_heads=whole,
    )  # fmt: skip
    fault = probe(pool, view)
    if fault:
        raise AdapterError(f"where K and V of {role} lie is not known: {fault}; {REMEDY}")
    if layers is None:
        layers = range(pool.start_layer, pool.start_layer + view.num_layers)
    return [Part(view, tuple(f"layer {number}" for number in layers))]


def _windowed(pool: Any, role: str, token_offset: int, window: int | None, shard: Shard | None) -> list[Part]:
    """Two pools: of layers that see all, and of layers with a window, whose slots are found by a map."""
    layers = [
        [n for n, (_, is_windowed) in pool.layers_mapping.items() if is_windowed is kind] for kind in (False, True)
    ]
    if not layers[0] or pool.full_to_swa_index_mapping is None or window is None:
        raise AdapterError(f"pools of windows alone are not followed, one layer must see all tokens; {REMEDY}")
    full = _within(pool.full_kv_pool, role, token_offset, shard, layers[0])
    if not layers[1]:
        return full
    [part] = _within(pool.swa_kv_pool, f"{role}, windows", token_offset, shard, layers[1])
    return [*full, Part(part.view, part.names, window + 1, pool.full_to_swa_index_mapping)]


def _beside_states(pool: Any, role: str, token_offset: int, window: int | None, shard: Shard | None) -> list[Part]:
    """Layers of attention, beside others that keep a state for each request."""
    return _within(pool.full_kv_pool, role, token_offset, shard, pool.full_attention_layer_id_mapping)


def _within(pool: Any, role: str, token_offset: int, shard: Shard | None, layers: Iterable[int]) -> list[Part]:
    """Of a pool within a pool, whose layers have other numbers in the model."""
    if READERS.get(type(pool).__name__) is not _plain:
        raise _not_followed(type(pool).__name__)
    return _plain(pool, role, token_offset, None, shard, layers)


def _not_followed(kind: str) -> AdapterError:
    why = NOT_FOLLOWED.get(kind, "their layout is not known")
    return AdapterError(f"pools of class {kind} are not followed: {why}; followed are {', '.join(READERS)}; {REMEDY}")


READERS: dict[str, Callable[[Any, str, int, int | None, Shard | None], list[Part]]] = {
    "MHATokenToKVPool": _plain,
    "MLATokenToKVPool": _plain,
    "SWAKVPool": _windowed,
    "HybridLinearKVPool": _beside_states,
}


@torch.inference_mode()
def probe(pool: Any, view: PoolView) -> str:
    """What speaks against this reading, after the pool has stored K and V that are known; empty: nothing.

    Not slot 0, which takes the writes of padding: kernels for GPUs store nothing there. What lay in the other slots is
    put back, for in pools with pages of one they are somebody's.
    """
    slots = torch.arange(1, 3, device=view.device)
    page = slice(0, 3 if view.k[0].dim() == 3 else 2 // view.page_size + 1)
    last = view.num_layers - 1
    held = [buffers[last][page].clone() for buffers in _buffers(pool)]
    generator = torch.Generator().manual_seed(1)
    shapes = view.value_shapes(len(slots))
    values = [torch.randn(shape, generator=generator).to(pool.dtype).to(view.device) for shape in shapes]
    try:
        pool.set_kv_buffer(None, slots, values[0], values[-1], layer_id_override=pool.start_layer + last)
        wanted = torch.cat([value.flatten(1).contiguous().view(torch.int32) for value in values], 1)
        return "" if torch.equal(view.rows.gather_layer(last, slots), wanted) else "it does not show what was stored"
    finally:
        for buffers, before in zip(_buffers(pool), held, strict=True):
            buffers[last][page] = before


def _buffers(pool: Any) -> list[list[Tensor]]:
    """[K, V], or [latent rows], each one tensor a layer."""
    latent = getattr(pool, "kv_buffer", None)
    return [latent] if latent is not None else [pool.k_buffer, pool.v_buffer]


def _typed(pool: Any) -> list[list[Tensor]]:
    """The same as elements of the type that they mean: 8-bit floats are kept as bytes."""
    return [[tensor.view(pool.dtype) for tensor in tensors] for tensors in _buffers(pool)]
