"""Tiny random models of transformers and ways to generate with them, and a stand-in for vLLM."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from kvcanary.adapters import vllm as plugin
from kvcanary_tools.bench import transformers_clean as ways

from .served import Served

STANDIN = Path(__file__).parent / "standin"
FULL = {"KVCANARY_MODE": "raise", "KVCANARY_CONTENT": "full", "KVCANARY_SEED": "7"}


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


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is `vllm` as long as a test runs."""
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, value in FULL.items():
        monkeypatch.setenv(name, value)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def serve(host) -> Iterator[Callable[..., Served]]:
    """Make(settings of Served) a worker with the plug-in."""
    plugin.register()
    yield Served
    plugin.unregister()
