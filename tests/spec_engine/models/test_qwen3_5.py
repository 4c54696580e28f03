"""Qwen3.5: our decoder against transformers' own, from the same checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.recurrent import RecurrentPool
from spec_engine.mock import MockTokenizer
from spec_engine.mock.known import DenseKV
from spec_engine.models import CheckpointError, load_target
from spec_engine.models.config import load_config, parse_config
from spec_engine.models.loader import load_standalone

transformers = pytest.importorskip("transformers", minversion="5.2")

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    """A model of random weights, norms and decays included."""
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "linear_attn" not in name:
            parameter.data.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def folder(theirs: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint, as transformers writes it."""
    path = tmp_path_factory.mktemp("qwen3_5")
    theirs.save_pretrained(path)
    return path


@torch.no_grad()
def logits_of(folder: Path, chunks: list[list[int]]) -> torch.Tensor:
    """Of our decoder, over one request in chunks."""
    model, kv = load_target(folder), DenseKV()
    sizes = {"num_layers": model.num_state_layers, "size": model.state_size, "dtype": torch.float32}
    pool = RecurrentPool(num_rows=1, max_nodes=1, device=torch.device("cpu"), **sizes)
    hidden, begin = [], 0
    for chunk in chunks:
        positions = torch.arange(begin, begin + len(chunk))
        hidden.append(model(torch.tensor(chunk), positions, kv, (), pool.chain([1], [len(chunk)])).hidden)
        begin += len(chunk)
    return model.logits(torch.cat(hidden))


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[], [1, 4, 5]])
def test_logits_are_those_of_transformers(theirs: torch.nn.Module, folder: Path, cuts: list[int]) -> None:
    """At once and in chunks."""
    chunks = [TOKENS[a:b] for a, b in zip([0, *cuts], [*cuts, len(TOKENS)], strict=True)]
    wanted = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(folder, chunks), wanted, atol=2e-5, rtol=2e-4)


def test_a_checkpoint_that_sees_is_read_for_its_text(theirs: torch.nn.Module, folder: Path, tmp_path: Path) -> None:
    """As it is published: its config is a part, and its tensors are some of all; what sees or drafts is left out."""
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": config["tie_word_embeddings"]}))
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(named | {"model.visual.x": torch.ones(1), "mtp.x": torch.ones(1)}, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(tmp_path, [TOKENS]), logits_of(folder, [TOKENS]))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_config(tmp_path).eos_token_ids == (7, 8)


def test_it_is_no_draft_of_another_model(folder: Path) -> None:
    """A draft has no room for states."""
    with pytest.raises(CheckpointError, match="a standalone draft must have attention in all layers, got Qwen3_5For"):
        load_standalone(folder, load_target(folder))


def test_it_runs_on_one_rank(folder: Path) -> None:
    """Its layers are not cut."""
    with pytest.raises(CheckpointError, match="must run on one rank, got 2"):
        load_target(folder, shard=(0, 2))


def test_an_engine_says_what_transformers_says(theirs: torch.nn.Module, folder: Path) -> None:
    """Greedy, prompts in chunks, over pages."""
    canary = CanaryConfig(mode="raise", content="full")
    config = EngineConfig(draft="none", max_total_tokens=256, prefill_chunk_tokens=4, canary=canary)
    engine = Engine(config, model=load_target(folder), tokenizer=MockTokenizer())
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    [output] = engine.generate([TOKENS], params)
    wanted = theirs.generate(torch.tensor([TOKENS]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert list(output.token_ids) == wanted[0, len(TOKENS) :].tolist()
    assert engine.canary.certificate()["states_checked"] >= 12


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types must be linear_attention or full_attention for each of 4"),
        ({"layer_types": ["mamba"] * 4}, "got .'mamba'"),
        ({"linear_num_value_heads": 3}, "value heads of a gated delta net must be a multiple of its key heads"),
        ({"linear_conv_kernel_dim": 0}, "all sizes positive"),
        ({"linear_key_head_dim": "8"}, "config.json must hold values of the expected kinds"),
        ({"linear_num_key_heads": 0}, "all sizes positive"),
        ({"head_dim": 12}, "head_dim must be even for rotary embeddings, got 12 of which 3 are rotated"),
    ],
)
def test_what_cannot_be_is_refused(raw: dict[str, object], words: str) -> None:
    """A sentence names the setting."""
    own = SIZES | {"architectures": ["Qwen3_5ForCausalLM"], "linear_conv_kernel_dim": 4} | raw
    with pytest.raises(CheckpointError, match=words):
        parse_config(own)
