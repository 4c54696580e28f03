"""A small llama with random weights: float64, so that runs can be compared token for token."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder

Model = TypeVar("Model", bound=nn.Module)


def random_model(
    seed: int = 0, *, dtype: torch.dtype = torch.float64, logit_scale: float = 1.0, **config: object
) -> Decoder:
    """Two layers, 97 tokens, 512 positions unless `config` (names of config.json) says otherwise.

    logit_scale: above 1 the model is surer of what it chooses; at 20 its top probability is nearly always above 0.9.
    """
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 512,
    }
    model = with_random_weights(Decoder(parse_config(raw | config)), seed, dtype)
    model.lm_head_weight.data *= logit_scale
    return model


def with_random_weights(model: Model, seed: int, dtype: torch.dtype = torch.float64) -> Model:
    """Fills every matrix so that products keep their scale, and every norm with ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = torch.ones_like(value) if "norm" in name else value * parameter.shape[-1] ** -0.5
    return model.to(dtype).requires_grad_(False).eval()
