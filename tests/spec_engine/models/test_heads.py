"""EAGLE and EAGLE-3 heads compute their published forward, checked against one written out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_engine.models import CheckpointError, decoder, eagle, eagle3, load_draft, load_target

VOCAB, EPS = 97, 1e-6


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """One head at one position, pair by pair."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def layer(w: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor) -> Tensor:
    """Attention over x (4 query heads, 2 KV heads of 8), then residual and MLP, token by token."""
    q, k, v = (x @ w[f"{prefix}self_attn.{p}_proj.weight"].T for p in "qkv")
    out = []
    for t in range(len(x)):
        heads = []
        for head in range(4):
            part, kv_part = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
            query = rotated(q[t, part], t)
            keys = torch.stack([rotated(k[s, kv_part], s) for s in range(t + 1)])
            heads.append((keys @ query / math.sqrt(8)).softmax(0) @ v[: t + 1, kv_part])
        out.append(torch.cat(heads))
    hidden = residual + torch.stack(out) @ w[f"{prefix}self_attn.o_proj.weight"].T
    x = norm(hidden, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = x @ w[f"{prefix}mlp.gate_proj.weight"].T, x @ w[f"{prefix}mlp.up_proj.weight"].T
    return hidden + (gate * torch.sigmoid(gate) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


@pytest.fixture
def loaded(toy_model: Path, plain_kv):
    target = load_target(toy_model, torch.float64)
    ids = torch.tensor([5, 40, 3, 77, 40, 0, 96])
    return target, ids, torch.arange(7)


def doubles(path: Path) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in load_file(path).items()}


@torch.no_grad()
def test_eagle(toy_model: Path, loaded, plain_kv) -> None:
    """EAGLE: fc over embedding and hidden, a layer without input norm, the target's lm_head without a final norm."""
    target, ids, positions = loaded
    head = load_draft(toy_model / "eagle", target, torch.float64)
    output = target(ids, positions, plain_kv(), head.tap_layers)
    hidden = head(ids.roll(-1), head.features(output), positions, plain_kv())
    w, embed = doubles(toy_model / "eagle/model.safetensors"), target.embed_weight
    x = torch.cat((embed[ids.roll(-1)], output.hidden), -1) @ w["fc.weight"].T
    expected = layer(w, "layers.0.", x, x)
    torch.testing.assert_close(hidden, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(head.logits(hidden), expected @ embed.T, atol=1e-5, rtol=1e-5)
    assert (head.kind, head.num_layers, head.tap_layers, head.num_draft_vocab) == ("eagle", 1, (), VOCAB)
    assert head.to_target_ids(ids).equal(ids)


@torch.no_grad()
def test_eagle3(toy_model: Path, loaded, plain_kv) -> None:
    """EAGLE-3: fused taps as residual, both inputs normed and joined; what it hands on is before its last norm."""
    target, ids, positions = loaded
    head = load_draft(toy_model / "eagle3", target, torch.float64)
    assert head.tap_layers == (2, 4, 5)
    output = target(ids, positions, plain_kv(), head.tap_layers)
    features = head.features(output)
    hidden = head(ids.roll(-1), features, positions, plain_kv())
    w = doubles(toy_model / "eagle3/model.safetensors")
    fused = output.taps @ w["fc.weight"].T
    embedding = norm(target.embed_weight[ids.roll(-1)], w["midlayer.input_layernorm.weight"])
    x = torch.cat((embedding, norm(fused, w["midlayer.hidden_norm.weight"])), -1)
    expected = layer(w, "midlayer.", x, fused)
    torch.testing.assert_close(features, fused)
    torch.testing.assert_close(hidden, expected, atol=1e-6, rtol=1e-6)
    logits = norm(expected, w["norm.weight"]) @ w["lm_head.weight"].T
    torch.testing.assert_close(head.logits(hidden), logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_kernels_compute_what_torch_does(kind: str, toy_model: Path, loaded, plain_kv, monkeypatch) -> None:
    """On a GPU norms and products of a head are our kernels, here in Triton's interpreter; not where it is trained."""
    _, ids, positions = loaded
    target = load_target(toy_model, torch.float32)
    head = load_draft(toy_model / kind, target, torch.float32)
    for weight in [*target.parameters(), *head.parameters()]:
        weight.data = weight.data.contiguous()  # as on a GPU
    output = target(ids, positions, plain_kv(), head.tap_layers)

    def run() -> list[Tensor]:
        features = head.features(output)
        hidden = head(ids, features, positions, plain_kv())
        return [features, hidden, head.logits(hidden)]

    expected = run()
    for module in (decoder, eagle, eagle3):
        monkeypatch.setattr(module, "is_fused", lambda x: True)
    for one, other in zip(run(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    head.requires_grad_(True)
    monkeypatch.setattr(decoder, "is_fused", lambda x: False)  # of layers
    monkeypatch.setattr("kvcanary_kernels.engine.layers.norm", None)
    monkeypatch.setattr("spec_engine.models.fused.linear", None)
    for one, other in zip(run(), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_eagle3_draft_ids_are_offsets(toy_model: Path, loaded) -> None:
    """A draft id becomes the target id that d2t's offset says, and t2d marks exactly those."""
    target = loaded[0]
    head = load_draft(toy_model / "eagle3", target)
    ids = head.to_target_ids(torch.arange(head.num_draft_vocab))
    assert ids.tolist() == [*range(10), *range(30, VOCAB)]
    assert head.t2d.nonzero().flatten().equal(ids)


def test_eagle3_without_taps_says_so(toy_model: Path, loaded, plain_kv) -> None:
    """Features from a forward that tapped nothing are refused with the layers to tap."""
    target, ids, positions = loaded
    head = load_draft(toy_model / "eagle3", target)
    with pytest.raises(ValueError, match=r"tap layers \(2, 4, 5\), got no taps"):
        head.features(target(ids, positions, plain_kv()))


@torch.no_grad()
def test_heads_may_bring_bias_and_embedding(toy_model: Path, loaded, plain_kv, tmp_path: Path) -> None:
    """An EAGLE checkpoint with fc.bias and its own embed_tokens uses both."""
    target, ids, positions = loaded
    tensors = load_file(toy_model / "eagle/model.safetensors")
    tensors |= {"fc.bias": torch.full((32,), 0.25), "embed_tokens.weight": torch.zeros(VOCAB, 32)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((toy_model / "eagle/config.json").read_text())
    head = load_draft(tmp_path, target, torch.float64)
    hidden = target(ids, positions, plain_kv()).hidden
    w = doubles(tmp_path / "model.safetensors")
    x = torch.cat((torch.zeros_like(hidden), hidden), -1) @ w["fc.weight"].T + 0.25
    torch.testing.assert_close(
        head(ids, hidden, positions, plain_kv()), layer(w, "layers.0.", x, x), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 96}, "the draft head's vocab_size must be the target's, got 96 and 97"),
        ({"hidden_size": 64}, "the draft head's hidden_size must be the target's, got 64 and 32"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}},
            r"tapped layers must ascend within the target's 8 layers, got \[2, 4, 8\]",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(toy_model: Path, loaded, tmp_path: Path, change: dict, words: str) -> None:
    """A head made for another target is refused with both numbers."""
    raw = json.loads((toy_model / "eagle3/config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((toy_model / "eagle3/model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=words):
        load_draft(tmp_path, loaded[0])
