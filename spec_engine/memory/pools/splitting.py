"""A split pool in the engine: the target's K and V on the device as far as there is room, the others on the host."""

from __future__ import annotations

import torch

from spec_engine.config import EngineConfig
from spec_engine.errors import ConfigError
from spec_engine.memory.pools.split_pool import SplitPool
from spec_engine.memory.sizes import Sizes
from spec_engine.memory.sizing import pages_for
from spec_engine.models.decoder import Decoder


def split_pool(
    config: EngineConfig, model: Decoder, sizes: Sizes, quarantine: int, device: torch.device
) -> SplitPool | None:
    """The allocator of full pages and of their places on the device; None where all lie there.

    ConfigError for a model with a sliding window, and for a device that cannot hold one request's reserve.
    """
    asked, size = config.max_device_tokens, config.page_size
    if asked is None:
        return None
    if model.config.sliding_window is not None:
        raise ConfigError(
            f"max_device_tokens needs a model whose layers see everything, got one with a sliding window of "
            f"{model.config.sliding_window} positions: what a window has left is not kept at all",
            "leave max_device_tokens out, max_window_tokens sizes the pool of a window",
        )
    needed = pages_for(1, sizes.reserve, size)
    if asked // size < needed:
        raise ConfigError(
            f"max_device_tokens must hold one request's reserve, got {asked}: a token and a reserve of "
            f"{sizes.reserve} slots take {needed} pages of {size}",
            f"raise max_device_tokens to {needed * size} or more, or lower num_steps or page_size",
        )
    own = min(asked // size, sizes.num_pages)  # no more can be used
    return SplitPool(sizes.num_pages, own, page_size=size, device=device, quarantine=quarantine)
