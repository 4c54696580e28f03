"""Tiny random models of transformers, and ways to generate with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from kvcanary_tools.bench import transformers_clean as ways


@pytest.fixture(scope="module")
def models() -> Callable[..., Any]:
    """The model of a family; copies, so that no test changes another's."""
    made: dict[tuple[str, int, bool], Any] = {}

    def get(family: str = "Llama", seed: int = 0, batched: bool = False) -> Any:
        key = family, seed, batched
        if key not in made:
            made[key] = ways.make_model(family, seed, ways.BATCHED_FAMILIES[family] if batched else None)
        return copy.deepcopy(made[key])

    return get


@pytest.fixture
def generate(models) -> Callable[..., torch.Tensor]:
    """Generate in one of the ways from a fixed prompt and seed."""

    def run(model: Any, way: str = "greedy", tokens: int = 24, **others: Any) -> torch.Tensor:
        family = type(model).__name__.removesuffix("ForCausalLM")
        assistant = models(family, 1) if way == "assisted" else None
        return ways.generate(model, way, tokens, assistant=assistant, **others)

    return run
