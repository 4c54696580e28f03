"""Hybrids with random weights: their configuration alone is written, vLLM makes the parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_EVERY: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: Gated delta nets in three of four layers, as in Qwen3-Next; Mamba 2 and attention beside each other in every layer.
HYBRIDS: dict[str, dict[str, Any]] = {
    "gdn": _EVERY
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 32,
        "full_attention_interval": 4,
        "num_nextn_predict_layers": 1,  # which draft, where a server does
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
    },
    "mamba2": _EVERY
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "rms_norm_eps": 1e-5,
    },
}
#: The same as large as a model of 1.5 B parameters.
HYBRIDS["mamba2-1b"] = HYBRIDS["mamba2"] | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "mamba_d_ssm": 4096,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_chunk_size": 256,
}


QUIETER = 0.2  # how much less experts say where a layer drafts


def write_hybrid(folder: Path, kind: str) -> Path:
    """The configuration of one of HYBRIDS."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HYBRIDS[kind]))
    return folder


def draft_alike(target: Any, draft: Any) -> None:
    """Let the layer that drafts make of the last token's embedding what the target does, in most cases."""
    import torch

    randomise(draft)
    size = HYBRIDS["gdn"]["hidden_size"]
    draft.model.fc.forward = lambda hidden: hidden[..., :size]  # behind this lies what the target makes of the token
    with torch.no_grad():
        for model in (target, draft):
            for name, weight in model.named_parameters():
                if name.endswith("w2_weight"):
                    weight.mul_(QUIETER)


def randomise(model: Any) -> None:
    """Let a model whose weights are dummies say something else for other tokens."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
                weight.copy_((torch.randn(weight.shape, device=device, generator=generator) * scale).to(weight.dtype))
            elif "norm" in name:
                weight.fill_(0.0 if type(model).__name__.startswith("Qwen3Next") else 1.0)
