"""Heads under the names they are published with load, and compute what the papers say.

The reference below is written from the papers alone (EAGLE: arXiv 2401.15077, EAGLE-3: arXiv 2503.01840): whole
sequences in float64, no cache, rotation by complex numbers. Names as in yuhuili/EAGLE-LLaMA3-Instruct-8B and
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_engine.models import CheckpointError, load_draft, load_target

HIDDEN, MLP, HEADS, KV_HEADS, DIM, VOCAB, DRAFT_VOCAB = 32, 48, 4, 2, 8, 97, 60
EPS, THETA = 1e-5, 500000.0
LAYER = {
    "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
    "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, MLP),
    "mlp.gate_proj.weight": (MLP, HIDDEN),
    "mlp.up_proj.weight": (MLP, HIDDEN),
    "post_attention_layernorm.weight": (HIDDEN,),
}
EAGLE = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | {f"layers.0.{name}": shape for name, shape in LAYER.items()}
WIDE = {f"self_attn.{p}_proj.weight": (heads * DIM, 2 * HIDDEN) for p, heads in zip("qkv", (4, 2, 2), strict=True)}
EAGLE3 = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
} | {f"midlayer.{name}": shape for name, shape in (LAYER | WIDE).items()}
EMBEDDING = {"embed_tokens.weight": (VOCAB, HIDDEN)}
TARGET_IDS = torch.arange(DRAFT_VOCAB) * 3 // 2 + 4  # 60 of the 97 tokens have a draft token


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of x [n, heads, dim] at positions 0..n-1: pairs (i, i + dim/2) as complex numbers."""
    turns = torch.arange(len(x)).outer(THETA ** (-torch.arange(0, DIM, 2).double() / DIM))
    pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * torch.polar(torch.ones_like(turns), turns)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def decoder_layer(w: dict[str, Tensor], x: Tensor, residual: Tensor) -> Tensor:
    """Causal grouped-query attention over x, then the gated MLP, both added to the residual stream."""
    n = len(x)
    q, k, v = ((x @ w[f"self_attn.{p}_proj.weight"].T).view(n, -1, DIM) for p in "qkv")
    k, v = (rotate(k).repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1))
    scores = torch.einsum("ihd,jhd->hij", rotate(q), k) / DIM**0.5
    weights = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    hidden = residual + torch.einsum("hij,jhd->ihd", weights, v).flatten(1) @ w["self_attn.o_proj.weight"].T
    x = norm(hidden, w["post_attention_layernorm.weight"])
    gate = x @ w["mlp.gate_proj.weight"].T
    return hidden + (gate * gate.sigmoid() * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def eagle(w: dict[str, Tensor], embedding: Tensor, features: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and target logits: fc of (embedding, feature) through one layer without a norm before it."""
    x = torch.cat((embedding, features), -1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
    hidden = decoder_layer(part(w, "layers.0."), x, x)
    return hidden, hidden @ lm_head.T


def eagle3(w: dict[str, Tensor], embedding: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and logits over the draft's vocabulary: one layer over (normed embedding, normed feature)."""
    middle = part(w, "midlayer.")
    x = torch.cat((norm(embedding, middle["input_layernorm.weight"]), norm(features, middle["hidden_norm.weight"])), -1)
    hidden = decoder_layer(middle, x, features)
    return hidden, norm(hidden, w["norm.weight"]) @ w["lm_head.weight"].T


def part(w: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    scaled = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {name: (1 + t if "norm" in name else t).to(dtype) for name, t in scaled.items()}


def vocabulary() -> dict[str, Tensor]:
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[TARGET_IDS] = True
    return {"d2t": TARGET_IDS - torch.arange(DRAFT_VOCAB), "t2d": t2d}


def write(folder: Path, tensors: dict[str, Tensor], **config) -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
    }
    (folder / "config.json").write_text(json.dumps(raw | config))
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def target(toy_model: Path):
    return load_target(toy_model)


def drafted(head, target, plain_kv):
    """Hidden states and logits of a prompt of 9 tokens and of 3 draft steps that feed the head its own output."""
    ids = torch.tensor([5, 40, 3, 77, 40, 0, 96, 12, 13])
    output = target(ids, torch.arange(9), plain_kv(), head.tap_layers)
    tokens, kv = ids.roll(-1), plain_kv()
    hiddens = [head(tokens, head.features(output), torch.arange(9), kv)]
    for step in range(3):
        token = head.to_target_ids(head.logits(hiddens[-1][-1:]).argmax(-1))
        hiddens.append(head(token, hiddens[-1][-1:], torch.tensor([9 + step]), kv))
        tokens = torch.cat((tokens, token))
    return output, tokens, torch.cat(hiddens)


def check(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("prefix", "extra", "architecture"),
    [
        ("", EMBEDDING, "LlamaForCausalLM"),
        ("model.", {}, "LlamaForCausalLMEagle"),
        ("", {"fc.bias": (HIDDEN,)}, "LlamaForCausalLMEagle"),
    ],
)
def test_eagle_as_published(tmp_path: Path, target, plain_kv, dtype, prefix: str, extra: dict, architecture) -> None:
    """An EAGLE head equals the paper over a prompt and three draft steps, with rotary angles of its own."""
    tensors = random_tensors(EAGLE | extra, dtype)
    write(tmp_path, {prefix + name: t for name, t in tensors.items()}, architectures=[architecture])
    head = load_draft(tmp_path, target)
    assert (head.kind, head.tap_layers, head.num_draft_vocab) == ("eagle", (), VOCAB)
    output, tokens, hidden = drafted(head, target, plain_kv)
    w = {name: t.double() for name, t in tensors.items()}
    features = torch.cat((output.hidden, hidden[8:11])).double()  # a draft step reads the output of the one before
    embedding = w.get("embed_tokens.weight", target.embed_weight.double())[tokens]
    wanted, logits = eagle(w, embedding, features, target.lm_head_weight.double())
    check(hidden, wanted)
    check(head.logits(hidden), logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("prefix", "layer", "extra", "config"),
    [
        ("", "midlayer.", {}, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}),
        ("model.", "layers.0.", EMBEDDING, {"architectures": ["LlamaForCausalLMEagle3"]}),
    ],
)
def test_eagle3_as_published(tmp_path: Path, target, plain_kv, dtype, prefix, layer, extra, config) -> None:
    """An EAGLE-3 head equals the paper, and its 60 draft tokens stand for the target's that d2t says."""
    tensors = random_tensors(EAGLE3 | extra, dtype)
    stored = {prefix + name.replace("midlayer.", layer): t for name, t in (tensors | vocabulary()).items()}
    write(tmp_path, stored, draft_vocab_size=DRAFT_VOCAB, **config)
    head = load_draft(tmp_path, target)
    assert (head.kind, head.tap_layers, head.config.num_layers) == ("eagle3", (2, 4, 5), 1)
    output, tokens, hidden = drafted(head, target, plain_kv)
    w = {name: t.double() for name, t in tensors.items()}
    features = torch.cat((output.taps.double() @ w["fc.weight"].T, hidden[8:11].double()))
    embedding = w.get("embed_tokens.weight", target.embed_weight.double())[tokens]
    wanted, logits = eagle3(w, embedding, features)
    check(hidden, wanted)
    check(head.logits(hidden), logits)
    assert tokens[9:].equal(TARGET_IDS[logits[8:11].argmax(-1)])


def test_a_full_draft_vocabulary_needs_no_map(tmp_path: Path, target) -> None:
    """With as many draft tokens as the target has, d2t, t2d and lm_head may be left out: ids and lm_head are its."""
    shapes = {name: shape for name, shape in EAGLE3.items() if name != "lm_head.weight"}
    write(tmp_path, random_tensors(shapes, torch.float32))
    head = load_draft(tmp_path, target)
    ids = torch.arange(VOCAB)
    assert head.to_target_ids(ids).equal(ids)
    assert head.t2d.all()
    assert head.lm_head_weight.equal(target.lm_head_weight)


def test_t2d_follows_from_d2t(tmp_path: Path, target) -> None:
    """A head without t2d gets the one that d2t implies."""
    tensors = random_tensors(EAGLE3, torch.float32) | vocabulary()
    del tensors["t2d"]
    write(tmp_path, tensors, draft_vocab_size=DRAFT_VOCAB)
    assert load_draft(tmp_path, target).t2d.equal(vocabulary()["t2d"])


@pytest.mark.parametrize(("listed", "taps"), [([1, 3, 4], (2, 4, 5)), ([2, 4, 5], (2, 4, 5)), ([0, 1, 2], (0, 1, 2))])
def test_both_ways_to_count_tapped_layers(tmp_path: Path, target, listed, taps) -> None:
    """A list that begins with 1 names layers by their outputs, any other by their inputs."""
    eagle_config = {"eagle_aux_hidden_state_layer_ids": listed}
    tensors = random_tensors(EAGLE3, torch.float32) | vocabulary()
    write(tmp_path, tensors, draft_vocab_size=DRAFT_VOCAB, eagle_config=eagle_config)
    assert load_draft(tmp_path, target).tap_layers == taps


def broken_vocabulary(name: str, index: int, value: int) -> dict[str, Tensor]:
    tensors = vocabulary()
    tensors[name][index] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (broken_vocabulary("d2t", 59, 60), "d2t must map into the target's 97 tokens, it maps to 119$"),
        (broken_vocabulary("d2t", 0, -1), "d2t must map into the target's 97 tokens, it maps to -1$"),
        (broken_vocabulary("d2t", 0, 5), "d2t must map draft tokens to distinct target tokens, 1 are mapped to twice$"),
        (broken_vocabulary("t2d", 0, 1), "t2d must mark exactly the tokens that d2t maps to, 1 of them differ$"),
        ({"d2t": torch.zeros(DRAFT_VOCAB)}, "d2t must be one of int64, int32, int16, got float32: "),
        ({"t2d": torch.zeros(VOCAB)}, "t2d must be one of bool, got float32: "),
        ({"d2t": torch.zeros(DRAFT_VOCAB, 2, dtype=torch.int64)}, r"d2t must have shape \[60\], got \[60, 2\]$"),
        ({"d2t": torch.zeros(DRAFT_VOCAB - 1, dtype=torch.int64)}, r"d2t must have shape \[60\], got \[59\]$"),
    ],
)
def test_a_vocabulary_map_that_lies_is_refused(tmp_path: Path, target, tensors, words: str) -> None:
    """d2t out of range or not one to one, a t2d that disagrees, and wrong dtypes or shapes each have a sentence."""
    tensors = random_tensors(EAGLE3, torch.float32) | vocabulary() | tensors
    write(tmp_path, tensors, draft_vocab_size=DRAFT_VOCAB)
    with pytest.raises(CheckpointError, match=words):
        load_draft(tmp_path, target)


def test_a_reduced_vocabulary_needs_its_map(tmp_path: Path, target) -> None:
    """A head with fewer draft tokens than the target and no d2t is refused: its ids would mean nothing."""
    write(tmp_path, random_tensors(EAGLE3, torch.float32), draft_vocab_size=DRAFT_VOCAB)
    with pytest.raises(CheckpointError, match="2 missing: d2t, t2d"):
        load_draft(tmp_path, target)


def test_more_than_one_layer_is_surplus(tmp_path: Path, target) -> None:
    """A head of two layers is refused by the names of the second's tensors."""
    second = {"layers.1.mlp.up_proj.weight": (MLP, HIDDEN)}
    write(tmp_path, random_tensors(EAGLE | second, torch.float32))
    with pytest.raises(CheckpointError, match=r"1 surplus: layers\.1\.mlp\.up_proj\.weight"):
        load_draft(tmp_path, target)


def test_a_name_with_and_without_prefix_is_refused(tmp_path: Path, target) -> None:
    """The same tensor under two names is not guessed at."""
    for shapes, name, other in (
        (EAGLE, "model.fc.weight", "fc.weight"),
        (EAGLE3, "layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"),
    ):
        write(tmp_path, random_tensors(shapes | {name: shapes[other]}, torch.float32))
        with pytest.raises(CheckpointError, match=f"must name each tensor once, it holds {name} and {other}$"):
            load_draft(tmp_path, target)


def test_a_whole_model_is_no_head(toy_model: Path, target) -> None:
    """A folder with an ordinary model is refused as a head."""
    with pytest.raises(CheckpointError, match=r"a draft head must hold fc\.weight, .* does not"):
        load_draft(toy_model, target)
