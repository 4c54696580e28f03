"""Where K and V lie in a PagedAttentionCache of transformers, in both shapes that its API has had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def shape_of(cache: Any) -> list[tuple[int, int]]:
    """By group, the window (0: all) and how many indices there are."""
    if hasattr(cache, "cache_allocators"):
        allocators = sorted(cache.cache_allocators.values(), key=lambda allocator: allocator.index)
        return [
            (
                int(getattr(allocator, "sliding_window", 0) or 0),
                max(len(k) for k, _ in allocator._kv_token_views.values()),
            )
            for allocator in allocators
        ]
    windows = {group: cache.sliding_windows[layer] for layer, (group, _) in cache.layer_index_to_group_indices.items()}
    return [(0 if windows[n] == 1 else windows[n], len(cache.key_cache[0])) for n in range(cache.num_groups)]


def group_of(cache: Any, layer: int) -> int:
    if hasattr(cache, "layer_to_allocator"):
        return int(cache.layer_to_allocator[layer].index)
    return int(cache.layer_index_to_group_indices[layer][0])


def layers_of(cache: Any, group: int) -> list[int]:
    if hasattr(cache, "layer_to_allocator"):
        return [layer for layer, allocator in cache.layer_to_allocator.items() if allocator.index == group]
    return [layer for layer, (own, _) in cache.layer_index_to_group_indices.items() if own == group]


def memory_of(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """[indices, heads, dim] K and V of a layer."""
    if hasattr(cache, "layer_to_allocator"):
        return cache.layer_to_allocator[layer]._kv_token_views[layer]  # type: ignore[no-any-return]
    place = cache.layer_index_to_group_indices[layer][1]
    return cache.key_cache[place], cache.value_cache[place]


def block_size_of(cache: Any, group: int) -> int:
    """Indices from the beginning of one block to that of the next."""
    if hasattr(cache, "cache_allocators"):
        return int(_allocator(cache, group).block_physical_stride)
    return int(cache.block_size)


def block_of(cache: Any, group: int, block: int) -> Tensor:
    """[n] indices of one block."""
    if hasattr(cache, "cache_allocators"):
        allocator = _allocator(cache, group)
        return torch.arange(allocator.tokens_per_page) + block * allocator.block_physical_stride
    return torch.arange(cache.block_size) + block * cache.block_size


def _allocator(cache: Any, group: int) -> Any:
    return next(own for own in cache.cache_allocators.values() if own.index == group)
