"""A toy checkpoint with both draft heads: random weights, so tests use it for mechanics, not for acceptance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3
from spec_engine.models.files import save_tensors
from spec_engine.models.loader import hf_tensors

VOCAB = 97
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an 8-layer random Llama with `eagle/` and `eagle3/` heads and a one-letter tokenizer."""
    folder = tmp_path_factory.mktemp("toy")
    generator = torch.Generator().manual_seed(1)
    target = _saved(Decoder, folder, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}, generator)
    _saved(
        Eagle, folder / "eagle", {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}, generator, target
    )
    eagle3 = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": VOCAB - 20}
    _saved(Eagle3, folder / "eagle3", eagle3, generator, target)
    _save_tokenizer(folder)
    return folder


class DenseKV:
    """Causal attention over one forward's own rows."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        keys, values = (rows.repeat_interleave(group, 1) for rows in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[2] ** -0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), values)


@pytest.fixture
def dense_logits() -> Callable[[Decoder, torch.Tensor], torch.Tensor]:
    """``(target, tokens [L]) -> [L, V]``: the target's logits without a pool, pages or drafts."""
    return lambda target, tokens: target.logits(target(tokens, torch.arange(len(tokens)), DenseKV()).hidden)


def _saved(kind, folder: Path, extra: dict, generator: torch.Generator, *target):
    raw = SHAPE | extra
    model = kind(parse_config(raw), *target)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data = torch.ones_like(parameter) if "norm" in name else value
    if kind is Eagle3:
        model.d2t[10:] = 20  # draft ids past 9 stand for target ids 20 higher
        model.t2d[torch.arange(VOCAB - 20) + model.d2t] = True
    save_tensors(hf_tensors(model, torch.float32), folder)
    (folder / "config.json").write_text(json.dumps(raw))
    return model


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(33 + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
