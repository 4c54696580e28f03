"""Models with a sliding window in the engine: their pool lies behind a map and keeps only what is still seen."""

from __future__ import annotations

import torch

from spec_engine.attention.backends import BACKENDS, WINDOW_BACKENDS
from spec_engine.config import ConfigError, EngineConfig
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.sizing import pages_for
from spec_engine.memory.window_pool import WindowPool


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
    num_pages = min(_num_pages(config, window, reserve), full.num_pages)
    return WindowPool(full, PageAllocator(num_pages), window=window, page_size=config.page_size, device=device)


def _num_pages(config: EngineConfig, window: int, reserve: int) -> int:
    """What was asked for, or what all rows need at most: what they see and write in decode, and chunks of prefill."""
    size, rows = config.page_size, config.max_running_requests
    if config.max_window_tokens is not None:
        return config.max_window_tokens // size
    # a row's window begins and its reserve ends somewhere in a page, and a verify's tokens leave one step later
    row = pages_for(window + reserve, 0, size) + 2
    return rows * row + pages_for(config.prefill_chunk_tokens, 0, size)
