"""Models with recurrent layers in the engine: which settings they rule out, and the pool of their states.

A state cannot be cut back to an earlier length, nor found by a prefix: nothing of a prompt is shared or comes back from
the host.
"""

from __future__ import annotations

from dataclasses import replace

import structlog
import torch

from spec_engine.config import EngineConfig
from spec_engine.errors import ConfigError
from spec_engine.memory.recurrent import RecurrentPool
from spec_engine.models.decoder import Decoder
from spec_engine.models.hybrid import HybridDecoder

_events = structlog.get_logger("spec_engine")

WITHOUT_PREFIXES = (
    "the model has recurrent layers: it runs without a prefix cache, for no prefix has a state of its own"
)


def settings_for(model: Decoder, config: EngineConfig) -> EngineConfig:
    """The settings with which this model runs; ConfigError for those that its recurrent layers rule out."""
    if not isinstance(model, HybridDecoder):
        return config
    if config.host_pages:
        raise ConfigError(
            f"host_pages must be 0 for a model with recurrent layers, got {config.host_pages}: recurrent states have "
            "no pages that could wait on the host",
            "leave host_pages out",
        )
    _events.info("spec_engine.prefix_cache", is_on=False, sentence=WITHOUT_PREFIXES)
    return replace(config, prefix_cache=False)


def num_kv_layers(model: Decoder) -> int:
    """Layers that keep K and V."""
    return model.num_kv_layers if isinstance(model, HybridDecoder) else model.config.num_layers


def recurrent_pool(
    model: Decoder, max_nodes: int, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> RecurrentPool | None:
    """The states of all rows, and of ``max_nodes`` of their verifies, in float32 at least; None where the model has
    attention alone.
    """
    if not isinstance(model, HybridDecoder):
        return None
    return RecurrentPool(
        num_layers=model.num_state_layers,
        num_rows=config.max_running_requests,
        max_nodes=max_nodes,
        size=model.state_size,
        parts=model.state_parts,
        dtype=dtype if dtype is torch.float64 else torch.float32,
        device=device,
    )
