"""The models and the requests of the measurements inside vLLM: random parameters, prompts that share prefixes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvcanary_tools.bench.vllm.hybrids.models import randomise, write_hybrid

SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: 1.1 B parameters, whose steps the host bounds, and 7.2 B, whose steps the GPU does.
SHAPES = {
    "1b": SHAPE,
    "tiny": SHAPE
    | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024},
    "7b": SHAPE | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
}
REQUESTS, PREFIXES, PREFIX_TOKENS, OUTPUT_TOKENS = 256, 16, 240, 256
BLOCKS = 3600  # of 16 tokens: fewer than the requests would fill
STATE_BLOCKS = 800  # of hybrids, whose blocks are as large as a state
STATE_BLOCK = 576  # tokens of one: vLLM 0.26 chooses 528 and forgets the windows that drafts need
POOL_BYTES = 16 << 30  # more than they take; said so that vLLM need not measure what it could have


class Prompts(NamedTuple):
    """What prompts are like: each begins with one of a few prefixes, and has `shortest` to `longest` tokens more."""

    prefixes: int = PREFIXES
    prefix_tokens: int = PREFIX_TOKENS
    shortest: int = 20
    longest: int = 460
    vocabulary: int = 32000


def make_prompts(count: int = REQUESTS, seed: int = 3, kind: Prompts | None = None) -> list[list[int]]:
    """So many prompts, the same for the same seed."""
    kind = kind or Prompts()
    draw = random.Random(seed)
    prefixes = [[draw.randrange(3, kind.vocabulary) for _ in range(kind.prefix_tokens)] for _ in range(kind.prefixes)]
    lengths = range(kind.shortest, kind.longest)
    return [
        prefixes[draw.randrange(kind.prefixes)]
        + [draw.randrange(3, kind.vocabulary) for _ in range(draw.choice(lengths))]
        for _ in range(count)
    ]


def write_model(folder: Path, shape: dict[str, Any], is_draft: bool = False) -> Path:
    """A random checkpoint; a draft has what EAGLE adds, and shares the rest with its target."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(11 + is_draft)

    def random_weight(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, device=device, generator=generator) * scale).to(torch.bfloat16).cpu()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    before, tensors = "" if is_draft else "model.", {}
    for layer in range(shape["num_hidden_layers"]):
        name = f"{before}layers.{layer}."
        for part, rows, columns in (
            ("q", heads, hidden),
            ("k", kv_heads, hidden),
            ("v", kv_heads, hidden),
            ("o", hidden, heads),
        ):
            tensors[f"{name}self_attn.{part}_proj.weight"] = random_weight(rows, columns, columns**-0.5)
        for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[f"{name}mlp.{part}_proj.weight"] = random_weight(rows, columns, columns**-0.5)
        tensors[f"{name}post_attention_layernorm.weight"] = ones.clone()
        if not (is_draft and layer == 0):
            tensors[f"{name}input_layernorm.weight"] = ones.clone()
    if is_draft:
        tensors["fc.weight"] = random_weight(hidden, 2 * hidden, (2 * hidden) ** -0.5)
    else:
        tensors["model.embed_tokens.weight"] = random_weight(shape["vocab_size"], hidden, 1.0)
        tensors["lm_head.weight"] = random_weight(shape["vocab_size"], hidden, 2 * hidden**-0.5)
        tensors["model.norm.weight"] = ones.clone()
    save_file(tensors, str(folder / "model.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
    }
    config |= {"hidden_act": "silu", "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False}
    (folder / "config.json").write_text(json.dumps(shape | config))
    return folder


#: A DeepSeek V2 with the latent cache of the real one, 576 numbers an entry, and no experts.
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_latent_model(folder: Path, shape: dict[str, Any] = LATENT) -> Path:
    """A random checkpoint of LATENT, or of a shape like it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(11)
    hidden, heads, rank = shape["hidden_size"], shape["num_attention_heads"], shape["kv_lora_rank"]
    nope, rope, size_v = shape["qk_nope_head_dim"], shape["qk_rope_head_dim"], shape["v_head_dim"]
    inner, vocabulary = shape["intermediate_size"], shape["vocab_size"]

    def matrix(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        own = columns**-0.5 if scale is None else scale
        return (torch.randn(rows, columns, device=device, generator=generator) * own).to(torch.bfloat16).cpu()

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden, 1.0)}
    tensors["lm_head.weight"] = matrix(vocabulary, hidden, 2 * hidden**-0.5)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for part, rows, columns in (
            ("self_attn.q_proj", heads * (nope + rope), hidden),
            ("self_attn.kv_a_proj_with_mqa", rank + rope, hidden),
            ("self_attn.kv_b_proj", heads * (nope + size_v), rank),
            ("self_attn.o_proj", hidden, heads * size_v),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{name}{part}.weight"] = matrix(rows, columns)
        for part, size in (("self_attn.kv_a_layernorm", rank), ("input_layernorm", hidden)):
            tensors[f"{name}{part}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        tensors[f"{name}post_attention_layernorm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


#: DeepSeek-V2-Lite's attention and widths, without experts: 1.3 B parameters, 576 numbers an entry.
LITE = LATENT | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 14,
    "first_k_dense_replace": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
WINDOW = 128  # entries, as in gpt-oss: every other layer sees no more


class Kind(NamedTuple):
    """write: a checkpoint of this size into a folder;  engine: options of vLLM;  loaded: called with the model."""

    write: Callable[[Path, str], Path]
    engine: dict[str, Any]
    loaded: Callable[[Any], None] | None = None


def _dense(folder: Path, size: str) -> Path:
    return write_model(folder, SHAPES[size])


def _latent(folder: Path, size: str) -> Path:
    return write_latent_model(folder, LITE)


def _windows(folder: Path, size: str) -> Path:
    shape = SHAPES[size]
    layers = [("sliding_attention", "full_attention")[number % 2] for number in range(shape["num_hidden_layers"])]
    return write_model(folder, shape | {"layer_types": layers, "sliding_window": WINDOW})


def _hybrid(folder: Path, size: str) -> Path:
    return write_hybrid(folder, "mamba2-1b")


KINDS = {
    "dense": Kind(_dense, {}),
    "fp8": Kind(_dense, {"kv_cache_dtype": "fp8"}),
    "mla": Kind(_latent, {}),
    "windows": Kind(_windows, {}),
    "hybrid": Kind(
        _hybrid,
        {"load_format": "dummy", "num_gpu_blocks_override": STATE_BLOCKS, "block_size": STATE_BLOCK}
        | {"mamba_cache_mode": "align"},
        randomise,
    ),
}
