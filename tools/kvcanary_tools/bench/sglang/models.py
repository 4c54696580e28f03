"""Tiny models whose memory pools are of other classes than Llama's: a configuration each, weights are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False, "dtype": "float32", "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "initializer_range": 0.3,
}  # fmt: skip
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
#: By name, what stands in config.json beside COMMON.
KINDS: dict[str, dict[str, Any]] = {
    "latent": {  # MLATokenToKVPool
        "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "num_key_value_heads": 4,
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "scale_emb": 1, "scale_depth": 1.4, "dim_model_base": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "windows": {  # SWAKVPool
        "architectures": ["MellumForCausalLM"], "model_type": "mellum", "sliding_window": 16,
        "layer_types": [SLIDING, FULL, SLIDING, FULL], "mlp_layer_types": ["dense"] * 4, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 32,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in (SLIDING, FULL)},
    },
    "states": {  # HybridLinearKVPool
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": ["conv", FULL, "conv", FULL],
        "conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, "rope_theta": 10000.0,
    },
    "deltas": {  # the same, of gated delta nets, which keep a window and a matrix
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 2,
        "layer_types": [LINEAR, FULL], "full_attention_interval": 2, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "mamba2": {  # the same, beside attention in every layer
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "num_hidden_layers": 2,
        "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip

INTERPRETED = ("deltas", "mamba2")  # whose kernels Triton's interpreter runs
QUIET = OWN_DRAFTS = ("deltas",)  # of which drafts are often accepted; which have a layer that drafts
ASTRAY = 0.1  # how far a draft is from its target
QUIETER = 0.003  # how much layers add to their input there


def quieten(model: Any) -> None:
    """Let the next token hang on the last one, mostly."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            weight.data *= QUIETER


def _save_draft(model: Any, folder: Path) -> None:
    """The layer that drafts, as SGLang reads it with NEXTN: the target's first one with attention."""
    import torch
    from safetensors.torch import save_file

    held, size = "model.layers.1.", COMMON["hidden_size"]
    own = {n.replace(held, "mtp.layers.0."): w.clone() for n, w in model.state_dict().items() if n.startswith(held)}
    own["mtp.fc.weight"] = last_token(size)
    own |= {f"mtp.{name}.weight": torch.zeros(size) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    save_file(own, folder / "mtp.safetensors", metadata={"format": "pt"})


def last_token(size: int) -> Any:
    """[size, 2 * size] what a draft makes of a token's embedding and the target's state: mostly the first."""
    import torch

    return torch.cat((torch.eye(size) + torch.randn(size, size) * ASTRAY, torch.zeros(size, size)), 1)


def embedding(seed: int) -> Any:
    """What a request has for its second token, in place of the model's own."""
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds

    own = torch.randn(1, COMMON["hidden_size"], generator=torch.Generator().manual_seed(seed))
    return PositionalEmbeds(embeds=own, positions=[1])


def make(folder: Path, kind: str) -> Path:
    """The folder of such a model, which is made once."""
    own = folder / kind
    if not own.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        part = folder / f"{kind}.part"
        part.mkdir(exist_ok=True)
        (part / "config.json").write_text(json.dumps(COMMON | KINDS[kind]), encoding="utf-8")
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(part)).float()
        if kind in QUIET:
            quieten(model)
        model.save_pretrained(part)
        if kind in OWN_DRAFTS:
            _save_draft(model, part)
        (part / "config.json").write_text(json.dumps(COMMON | KINDS[kind]), encoding="utf-8")
        part.rename(own)
    return own
