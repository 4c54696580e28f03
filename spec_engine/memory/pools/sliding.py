"""Models with a sliding window in the engine: a pool behind a map keeps only what is still seen.

Layers that see everything beside it keep theirs in a pool of their own, whose slots are the full ones.
"""

from __future__ import annotations

import torch

from spec_engine.attention.backends import BACKENDS, WINDOW_BACKENDS
from spec_engine.config import EngineConfig
from spec_engine.errors import ConfigError
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.pools.recurrence import num_kv_layers
from spec_engine.memory.pools.window_pool import WindowPool
from spec_engine.memory.sizing import pages_for, window_row_pages
from spec_engine.models.decoder import Decoder


def pool_layers(model: Decoder) -> dict[str, tuple[int, ...]]:
    """By pool of the target the layers whose K and V it keeps, in the order of the pool's own."""
    config = model.config
    if not (config.full_layers and config.window_layers):
        return {"target": tuple(range(num_kv_layers(model)))}
    return {"target": config.full_layers, "window": config.window_layers}


def window_pool(
    full: PageAllocator, config: EngineConfig, window: int | None, reserve: int, device: torch.device
) -> WindowPool | None:
    """The allocator of both pools; None where layers see everything. ConfigError for a backend that reads no windows.

    Requests, tables and plans go on naming slots of ``full``: the draft's, and what the map translates.
    """
    if window is None:
        return None
    if not BACKENDS[config.attention_backend].supports_windows:
        raise ConfigError(
            f"attention_backend {config.attention_backend!r} reads no sliding windows, the model has one of {window} "
            f"positions: those that can are {', '.join(WINDOW_BACKENDS)}",
            "use one of these",
        )
    num_pages = min(_num_pages(config, window, reserve), full.num_pages)  # no more can be used
    own = PageAllocator(num_pages, full.quarantine)
    return WindowPool(full, own, window=window, page_size=config.page_size, device=device)


def check_draft_window(window: int | None) -> None:
    """ConfigError for a draft whose own layers have a window: its pool keeps whole rows."""
    if window is not None:
        raise ConfigError(
            f"a draft model must see everything, got one with a sliding window of {window} positions",
            "take a draft without a window, or draft none",
        )


def _num_pages(config: EngineConfig, window: int, reserve: int) -> int:
    """What was asked for, or what all rows need at most: what they see and write in decode, and chunks of prefill."""
    size, asked = config.page_size, config.max_window_tokens
    row, chunk = window_row_pages(window, reserve, size), pages_for(config.prefill_chunk_tokens, 0, size)
    if asked is None:
        return config.max_running_requests * row + chunk
    if asked // size < row + chunk:
        raise ConfigError(
            f"max_window_tokens must be at least {(row + chunk) * size}, got {asked}: a window of {window} positions, "
            f"a reserve of {reserve} and a chunk of {config.prefill_chunk_tokens} tokens take {row + chunk} pages of "
            f"{size} slots",
            "raise max_window_tokens or lower prefill_chunk_tokens",
        )
    return asked // size
