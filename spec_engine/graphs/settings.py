"""Which runner an engine has, and what a captured step cannot do yet."""

from __future__ import annotations

import torch

from spec_engine.config import EngineConfig
from spec_engine.errors import ConfigError
from spec_engine.models.decoder import Decoder
from spec_engine.step.runner import Runner


def runner_class(config: EngineConfig) -> type[Runner]:
    """What runs the steps; an engine without graphs loads nothing of them."""
    if config.graphs == "off":
        return Runner
    from spec_engine.graphs.runner import GraphRunner

    return GraphRunner


def check_model(config: EngineConfig, model: Decoder, device: torch.device) -> None:
    """ConfigError for a model whose decode steps cannot be captured."""
    if config.graphs == "off":
        return
    for what, is_so in (
        ("has a sliding window", model.config.sliding_window is not None),
        ("computes in float64 on a GPU", config.dtype == "float64" and device.type == "cuda"),
    ):
        if is_so:
            raise ConfigError(
                f"graphs must be off for a model that {what}: its step cannot be captured yet", "use graphs off"
            )
