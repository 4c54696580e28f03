"""Kinds of caches that vLLM keeps on a GPU: the model that is written for each, and options of its engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvcanary_tools.bench.vllm.model import LATENT, SHAPES, write_latent_model, write_model

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
    """write: a checkpoint of this size into a folder;  engine: options of vLLM."""

    write: Callable[[Path, str], Path]
    engine: dict[str, Any]


def _dense(folder: Path, size: str) -> Path:
    return write_model(folder, SHAPES[size])


def _latent(folder: Path, size: str) -> Path:
    return write_latent_model(folder, LITE)


def _windows(folder: Path, size: str) -> Path:
    shape = SHAPES[size]
    layers = [("sliding_attention", "full_attention")[number % 2] for number in range(shape["num_hidden_layers"])]
    return write_model(folder, shape | {"layer_types": layers, "sliding_window": WINDOW})


KINDS = {
    "dense": Kind(_dense, {}),
    "fp8": Kind(_dense, {"kv_cache_dtype": "fp8"}),
    "mla": Kind(_latent, {}),
    "windows": Kind(_windows, {}),
}
