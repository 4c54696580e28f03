"""The decoder computes what transformers computes, for every family it claims."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_engine.models import load_target
from spec_engine.models.decoder import DecoderLayer

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama-biased": ("Llama", {"attention_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2-mixed": ("Qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3-mixed": ("Qwen3", {"sliding_window": 5, "use_sliding_window": True, "layer_types": KINDS}),
}


def save_random(folder: Path, family: str, settings: dict) -> torch.nn.Module:
    """A random checkpoint as transformers writes it; norms and biases are random too, so that none is overlooked."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**(TINY | settings))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path, plain_kv) -> None:
    """Logits of a random checkpoint agree with transformers to 1e-4, in one forward and split over two."""
    theirs = save_random(tmp_path, *FAMILIES[name])
    ours = load_target(tmp_path)
    ids = torch.arange(37) * 13 % TINY["vocab_size"]
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        windows = ours.config.sliding_window, ours.config.window_layers
        whole = ours.logits(ours(ids, torch.arange(37), plain_kv(*windows)).hidden)
        kv = plain_kv(*windows)
        parts = [ours(ids[a:b], torch.arange(a, b), kv).hidden for a, b in ((0, 30), (30, 31), (31, 37))]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.logits(torch.cat(parts)), expected, atol=1e-4, rtol=0)


def test_taps_are_the_inputs_of_the_tapped_layers(tmp_path: Path, plain_kv) -> None:
    """Taps equal transformers' hidden states at the input of the tapped layers, side by side."""
    theirs = save_random(tmp_path, "Llama", {})
    ours = load_target(tmp_path)
    ids = torch.arange(9)
    with torch.no_grad():
        states = theirs(ids[None], output_hidden_states=True).hidden_states
        output = ours(ids, torch.arange(9), plain_kv(), tap_layers=(0, 2))
    torch.testing.assert_close(output.taps, torch.cat((states[0][0], states[2][0]), -1), atol=1e-4, rtol=0)
    torch.testing.assert_close(output.hidden, states[-1][0], atol=1e-4, rtol=0)


def test_of_unwanted_tokens_the_last_layer_keeps_keys_and_values_alone(
    tmp_path: Path, plain_kv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of wanted tokens are those of a whole forward, and what comes next reads the same cache."""
    save_random(tmp_path, "Llama", {})
    model, ids, wanted = load_target(tmp_path), torch.arange(9), torch.tensor([3, 8])
    finished = []
    finish = DecoderLayer.finish

    def counted(layer: DecoderLayer, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        finished.append(len(hidden))
        return finish(layer, hidden, attention)

    monkeypatch.setattr(DecoderLayer, "finish", counted)
    with torch.no_grad():
        caches = plain_kv(), plain_kv()
        whole = model(ids, torch.arange(9), caches[0]).hidden
        finished.clear()
        few = model(ids, torch.arange(9), caches[1], wanted=wanted).hidden
        assert finished == [9] * (len(model.layers) - 1) + [2]
        following = [model(torch.tensor([5]), torch.tensor([9]), kv).hidden for kv in caches]
    torch.testing.assert_close(few, whole[wanted], atol=1e-5, rtol=0)
    torch.testing.assert_close(*following, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_in_their_dtype(dtype: torch.dtype, tmp_path: Path, plain_kv) -> None:
    """A model loaded in float64 or bfloat16 computes in it and lands near float32."""
    save_random(tmp_path, "Qwen3", {})
    ids, positions = torch.arange(6), torch.arange(6)
    reference = load_target(tmp_path)
    model = load_target(tmp_path, dtype)
    with torch.no_grad():
        wanted = reference.logits(reference(ids, positions, plain_kv()).hidden)
        logits = model.logits(model(ids, positions, plain_kv()).hidden)
    assert logits.dtype == dtype
    difference = (logits.float() - wanted).norm() / wanted.norm()
    assert difference < (1e-5 if dtype == torch.float64 else 3e-2)


def test_no_tokens(tmp_path: Path, plain_kv) -> None:
    """An empty batch gives empty outputs."""

    class NothingKV:
        def attend(self, layer, q, k, v):
            return q

    save_random(tmp_path, "Llama", {})
    empty = torch.zeros(0, dtype=torch.int64)
    assert load_target(tmp_path)(empty, empty, NothingKV()).hidden.shape == (0, 48)
