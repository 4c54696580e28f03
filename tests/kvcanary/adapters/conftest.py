"""Tiny random models of transformers, and ways to generate with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

WINDOW = 8
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},  # every other layer has the window
}
#: By name, the arguments of generate(), and how many rows the prompt may have.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({}, 2),
    "sampling": ({"do_sample": True, "temperature": 1.3}, 2),
    "beams": ({"num_beams": 3}, 2),
    "assisted": ({}, 1),  # an assistant of the same family
    "lookup": ({"prompt_lookup_num_tokens": 3}, 1),
    "static": ({"cache_implementation": "static", "disable_compile": True}, 2),
}


def make_model(family: str = "Llama", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES[family]))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def models() -> Callable[..., Any]:
    """The model of a family; copies, so that no test changes another's."""
    made: dict[tuple[str, int], Any] = {}

    def get(family: str = "Llama", seed: int = 0) -> Any:
        if (family, seed) not in made:
            made[family, seed] = make_model(family, seed)
        return copy.deepcopy(made[family, seed])

    return get


@pytest.fixture
def generate(models) -> Callable[..., torch.Tensor]:
    """Generate in one of WAYS from a fixed prompt and seed."""

    def run(model: Any, way: str = "greedy", tokens: int = 24, **others: Any) -> torch.Tensor:
        arguments, rows = WAYS[way]
        torch.manual_seed(5)
        prompt = torch.randint(3, 97, (rows, 7))
        if way == "lookup":
            prompt = prompt.repeat(1, 3)
        if way == "assisted":
            arguments = {"assistant_model": models(type(model).__name__.removesuffix("ForCausalLM"), 1)}
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, **arguments, **others)

    return run
