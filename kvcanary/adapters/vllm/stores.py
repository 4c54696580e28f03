"""How a layer of vLLM stores, by what kind of layer it is: what a reading of its cache is proved by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcanary.errors import AdapterError

INDEX_SCALES = "ue8m0"  # as the indexer of DeepSeek V3.2 asks for
INDEX_BLOCK = 128
REMEDY = "unset KVCANARY_MODE to serve without a canary"


class Store(ABC):
    """Of one layer.

    shapes: of the values of one entry, heads and dim of each
    """

    shapes: tuple[tuple[int, int], ...]

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @abstractmethod
    def __call__(self, values: list[Tensor], slots: Tensor) -> None:
        """Store values [n, *shape] at slots [n], by the layer's own means."""


class KeyValueStore(Store):
    """K and V of an attention layer, of which V may have another size."""

    def __init__(self, layer: Any, heads: int, head_size: int, head_size_v: int) -> None:
        super().__init__(layer)
        self.shapes = (heads, head_size), (heads, head_size_v)

    def __call__(self, values: list[Tensor], slots: Tensor) -> None:
        self.layer.impl.do_kv_cache_update(self.layer, *values, self.layer.kv_cache, slots)


class LatentStore(Store):
    """The latent vector and the rotated part of an MLA layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.shapes = (1, layer.kv_lora_rank), (1, layer.qk_rope_head_dim)

    def __call__(self, values: list[Tensor], slots: Tensor) -> None:
        layer, (latent, rope) = self.layer, values
        scale = getattr(layer, "_k_scale", None)
        layer.impl.do_kv_cache_update(latent[:, 0], rope, layer.kv_cache, slots, layer.kv_cache_dtype, scale)


class IndexStore(Store):
    """Keys of a sparse index, which no attention layer stores."""

    def __init__(self, layer: Any, size: int) -> None:
        super().__init__(layer)
        self.shapes = ((1, size),)

    def __call__(self, values: list[Tensor], slots: Tensor) -> None:
        operation = import_module("vllm._custom_ops").indexer_k_quant_and_cache
        operation(values[0][:, 0].contiguous(), self.layer.kv_cache, slots, INDEX_BLOCK, INDEX_SCALES)


def store_of(layer: Any, spec: Any) -> Store | None:
    """`spec`: of the layer. None: its backend has no store that can be called."""
    if is_index(layer, spec):
        cell, block = layer.kv_cache.shape[-1], INDEX_BLOCK + 4
        return IndexStore(layer, cell - 4 * -(-cell // block))
    if getattr(getattr(layer, "impl", None), "do_kv_cache_update", None) is None:
        return None
    if is_latent(layer):
        return LatentStore(layer)
    size = spec.head_size
    return KeyValueStore(layer, spec.num_kv_heads, size, _size_of_v(layer, spec) or size)


def is_index(layer: Any, spec: Any) -> bool:
    """Whether it is the index cache of sparse attention: numbers and scales lie apart in its pages."""
    role = str(getattr(getattr(spec, "cache_role", None), "name", ""))
    has_role = role == "INDEXER" or "IndexerCache" in type(layer).__name__
    return has_role and layer.kv_cache.dtype is torch.uint8 and layer.kv_cache.dim() == 3


def is_latent(layer: Any) -> bool:
    """Whether it is an MLA layer."""
    return hasattr(layer, "kv_lora_rank") and hasattr(layer, "qk_rope_head_dim")


def cache_dtype_of(layer: Any) -> str:
    """As vLLM's setting says it."""
    return str(getattr(layer, "kv_cache_dtype", "auto"))


def expect_known(name: str, layer: Any, spec: Any) -> None:
    """AdapterError, by name, where cells are of a kind that is not followed."""
    if cache_dtype_of(layer).startswith("nvfp4"):
        raise AdapterError(
            f"layer {name} keeps NVFP4 ({cache_dtype_of(layer)}): numbers of 4 bits and their scales lie in two regions"
            f" of a page, which is not followed yet; choose another --kv-cache-dtype, or {REMEDY}"
        )
    version = getattr(spec, "model_version", None)
    if version is not None or getattr(spec, "tokens_per_state", 1) != 1 or type(spec).__name__ == "CircularBufferSpec":
        what = "DeepSeek V4" if version is None or "v4" in version else version
        raise AdapterError(
            f"layer {name} keeps one entry for several tokens, or a ring of them, as {what} does: that is not followed"
            f" yet; {REMEDY}"
        )
    if not isinstance(layer.kv_cache, torch.Tensor):
        raise AdapterError(f"layer {name} keeps a state, not K and V: it is not followed yet")


def _size_of_v(layer: Any, spec: Any) -> int | None:
    return getattr(layer, "head_size_v", None) or getattr(spec, "head_size_v", None)
