"""Models whose decode steps cannot be captured are refused at start; an engine without graphs loads none of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvcanary.invariants import IndexBufferError
from spec_engine import ConfigError, EngineConfig, SamplingParams
from spec_engine.graphs.settings import check_model
from spec_engine.models.embedded import EMBEDDED_MODEL
from spec_engine.models.loader import load_target


def test_a_model_that_cannot_be_captured_is_refused():
    """One sentence each; without graphs nothing is said."""
    model = load_target(EMBEDDED_MODEL, torch.float32, torch.device("cpu"))
    config, cpu, cuda = EngineConfig(graphs="on"), torch.device("cpu"), torch.device("cuda")
    check_model(config, model, cpu)
    window = SimpleNamespace(config=replace(model.config, sliding_window=32))
    for own, device, settings, words in (
        (window, cpu, {}, "has a sliding window"),
        (model, cuda, {"dtype": "float64"}, "computes in float64 on a GPU"),
    ):
        with pytest.raises(ConfigError, match=f"graphs must be off for a model that {words}: its step cannot be"):
            check_model(replace(config, **settings), own, device)
        check_model(replace(config, graphs="off", **settings), own, device)


def test_without_graphs_nothing_of_them_is_loaded():
    """An engine whose steps run as they come imports no program."""
    program = (
        "import sys; from spec_engine import Engine, EngineConfig; Engine(EngineConfig(max_total_tokens=256));"
        "print(sorted(name for name in sys.modules if name.startswith('spec_engine.graphs')))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['spec_engine.graphs', 'spec_engine.graphs.settings']"


def test_what_would_not_fit_is_refused_before_a_captured_launch(make, monkeypatch):
    """Index entries are judged by the very buffer of each draft forward: one that is too short by now is not filled."""
    engine = make(graphs="on", mode="off", page_size=1, topk=4, num_steps=3, num_draft_tokens=8, context_length=64)
    launched, step = [], engine.runner._buckets[0].step
    hooked = step._draft_forwards[1]
    size = step.size
    short = replace(hooked.forward, indices=hooked.forward.indices[: 4 * (50 + 2 * size) - 1])
    step._draft_forwards[1] = replace(hooked, forward=short)
    monkeypatch.setattr(step, "_run", lambda: launched.append("step"))
    counted = rf"topk 4 \* \(committed 50 \+ requests {size} \* own slots 2\)"
    words = rf"draft\[1\]: {counted} = .* <= size {short.indices.numel()}"
    with pytest.raises(IndexBufferError, match=words):
        engine.generate([[7] * 50], SamplingParams(max_new_tokens=4))
    assert launched == []
