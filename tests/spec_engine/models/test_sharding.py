"""What a rank holds of a checkpoint: its parts together are the whole, and nothing else is read."""

from __future__ import annotations

import json

import pytest
import torch

from spec_engine.mock import random_model
from spec_engine.models import CheckpointError
from spec_engine.models.files import save_tensors
from spec_engine.models.loader import hf_tensors, load_target, shard_target

BIASED = {"architectures": ["LlamaForCausalLM"], "attention_bias": True}
RAW = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}


def test_parts_sum_to_the_whole():
    """Rows of q, k, v, gate and up follow one another, columns of o and down too; biases of o are rank 0's alone."""
    whole = random_model(0, **BIASED)
    full = hf_tensors(whole, torch.float64)
    parts = [hf_tensors(shard_target(whole, rank, 2), torch.float64) for rank in range(2)]
    for name, tensor in full.items():
        own = [part[name] for part in parts]
        if name.endswith("o_proj.bias"):
            assert torch.equal(own[0], tensor)
            assert not own[1].any()
        elif "_proj" in name:
            assert torch.equal(torch.cat(own, int("o_proj" in name or "down" in name)), tensor)
        else:
            assert all(torch.equal(one, tensor) for one in own)


def test_a_folder_gives_the_same_parts(tmp_path):
    """Slices read from a safetensors file are those that are cut from a model in memory."""
    whole = random_model(0, **BIASED)
    save_tensors(hf_tensors(whole, torch.float64), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW | BIASED))
    for rank in range(4):  # two ranks to a KV head
        loaded = load_target(tmp_path, torch.float64, shard=(rank, 4)).state_dict()
        expected = shard_target(whole, rank, 4).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_ranks_that_do_not_divide_are_refused():
    """Heads, columns and KV heads: each with its number."""
    config = random_model(0).config
    with pytest.raises(CheckpointError, match="num_heads must be a multiple of the 3 ranks, got 4"):
        config.shard(0, 3)
    three = random_model(0, hidden_size=48, num_attention_heads=6, num_key_value_heads=2).config
    with pytest.raises(CheckpointError, match="got 2 heads and 3 ranks"):
        three.shard(0, 3)
    with pytest.raises(CheckpointError, match="got rank 2"):
        config.shard(2, 2)


def test_a_tensor_of_another_size_is_not_cut_in_silence(tmp_path):
    """A checkpoint with more columns than its config says would otherwise give a plausible part."""
    tensors = hf_tensors(random_model(0), torch.float64)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.cat((tensors[name], tensors[name]), 1)
    save_tensors(tensors, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight must have 48 along dimension 1"):
        load_target(tmp_path, torch.float64, shard=(0, 2))


def test_first_heads_say_where_a_rank_begins():
    """Fingerprints of a rank's KV heads take the keys of the whole model's row."""
    config = random_model(0).config
    assert [config.shard(rank, 2).first_kv_head for rank in range(2)] == [0, 1]
    assert [config.shard(rank, 4).first_kv_head for rank in range(4)] == [0, 0, 1, 1]
    assert config.first_kv_head == 0
