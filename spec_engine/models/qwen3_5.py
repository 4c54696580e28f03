"""Tensors of a Qwen3.5 checkpoint in the layout of our decoder.

It differs from Qwen3 in what follows, beside its layers with a gated delta net. Norms are stored as their distance from
one. A head's query and the gate of its output are one matrix. Of a head the first quarter is rotated; as our kernel
turns number i of a head with number i + half of it, the numbers of queries and keys are put into that order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_engine.models.config import ModelConfig

#: Of a checkpoint that sees: its text model's names, and what is left out, as the layers that draft.
TEXT, OTHERS = "model.language_model.", ("model.visual.", "mtp.")


def as_ours(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """By the names of `HybridDecoder.hf_names`, in its layout."""
    ours = {}
    for name, tensor in tensors.items():
        if name.startswith(OTHERS):
            continue
        name = "model." + name.removeprefix(TEXT) if name.startswith(TEXT) else name
        module, _, kind = name.rpartition(".")
        if name.endswith("linear_attn.conv1d.weight"):
            ours[name] = tensor.flatten(1)
        elif module.endswith("q_proj"):
            query, gate = tensor.view(config.num_heads, 2, config.head_dim, -1).unbind(1)
            ours[name] = _in_order(query, config).flatten(0, 1)
            ours[f"{module.removesuffix('q_proj')}gate_proj.{kind}"] = gate.flatten(0, 1)
        elif module.endswith("k_proj"):
            ours[name] = _in_order(tensor.view(config.num_kv_heads, config.head_dim, -1), config).flatten(0, 1)
        elif module.endswith(("q_norm", "k_norm")):
            ours[name] = _in_order(1 + tensor[None], config)[0]
        elif module.endswith("norm") and not module.endswith("linear_attn.norm"):
            ours[name] = 1 + tensor
        else:
            ours[name] = tensor
    return ours


def _in_order(heads: Tensor, config: ModelConfig) -> Tensor:
    """[heads, head_dim, ...]: the numbers that are rotated lead both halves of a head."""
    half, turned = config.head_dim // 2, config.rotary_dim // 2
    still = torch.arange(config.rotary_dim, config.head_dim)
    order = torch.arange(turned), still[: half - turned], torch.arange(turned, 2 * turned), still[half - turned :]
    return heads[:, torch.cat(order)]
