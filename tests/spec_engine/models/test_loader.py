"""Checkpoints that cannot be run are refused with a sentence that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcanary.errors import KVCanaryError
from spec_engine.models import CheckpointError, load_target
from spec_engine.models.config import parse_config
from spec_engine.models.files import read_tensors, save_tensors
from spec_engine.models.loader import hf_tensors

KINDS = ["full_attention", "sliding_attention"]
LAYER0_Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(toy_model: Path, tmp_path: Path) -> Path:
    """A private copy of the toy target, to break."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((toy_model / name).read_bytes())
    return tmp_path


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_and_surplus_tensors_are_named(checkpoint: Path) -> None:
    """A renamed tensor is reported as one missing and one surplus, by name."""
    edit_tensors(checkpoint, lambda tensors: tensors.update({"model.layers.0.oops": tensors.pop(LAYER0_Q)}))
    with pytest.raises(CheckpointError, match=f"1 missing: {LAYER0_Q}; 1 surplus: model.layers.0.oops"):
        load_target(checkpoint)


def test_a_misshapen_tensor_is_named_with_both_shapes(checkpoint: Path) -> None:
    """A tensor of the wrong shape is refused even where stacking would have hidden it."""
    edit_tensors(checkpoint, lambda tensors: tensors.update({LAYER0_Q: torch.zeros(16, 32)}))
    with pytest.raises(CheckpointError, match=rf"{LAYER0_Q} must have shape \[32, 32\], got \[16, 32\]"):
        load_target(checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 128,
                "layer_types": ["chunked_attention"] * 8,
            },
            "layer_types must be full_attention or sliding_attention, got chunked_attention",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 128,
                "layer_types": ["full_attention"] * 7,
            },
            "layer_types must name each of 8 layers, got 7 names",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type must be default, linear or llama3, got yarn"),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture must be one of .*Qwen3ForCausalLM.*, got GPT2LMHeadModel",
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "a target must be one of .*, got LlamaForCausalLMEagle3"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
        ({"mlp_bias": True}, "mlp_bias must be false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "must not be quantized, got quantization method awq"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, got 4 and 3"),
    ],
)
def test_what_is_not_supported_is_refused(checkpoint: Path, changes: dict, words: str) -> None:
    """Each unsupported setting of config.json has a sentence of its own."""
    edit_config(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_target(checkpoint)


def test_a_window_that_covers_the_context_is_no_window(checkpoint: Path) -> None:
    """sliding_window is accepted where it is as wide as the context, or switched off as Qwen does."""
    edit_config(checkpoint, architectures=["MistralForCausalLM"], sliding_window=512)
    load_target(checkpoint)
    raw = json.loads((checkpoint / "config.json").read_text())
    parse_config(raw | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False})


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"]}, 64),
        ({"architectures": ["LlamaForCausalLM"]}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 0}, 64),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 8}, None),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"] * 8},
            None,
        ),
    ],
)
def test_a_window_is_read_where_the_architecture_has_one(checkpoint: Path, changes: dict, window: int | None) -> None:
    """Mistral always, Qwen where it is switched on and has layers for it, Llama never."""
    raw = json.loads((checkpoint / "config.json").read_text()) | {"sliding_window": 64}
    assert parse_config(raw | changes).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 3}, (0, 1, 2)),
        ({"architectures": ["MistralForCausalLM"], "layer_types": KINDS * 4}, (0, 2, 4, 6)),
    ],
)
def test_layers_that_see_everything_are_named(checkpoint: Path, changes: dict, full: tuple[int, ...]) -> None:
    """Qwen2 counts the first ones, layer_types names each."""
    raw = json.loads((checkpoint / "config.json").read_text()) | {"sliding_window": 64}
    config = parse_config(raw | changes)
    assert (config.sliding_window, config.full_layers) == (64, full)
    assert config.window_layers == tuple(sorted(set(range(8)) - set(full)))


@pytest.mark.parametrize("gone", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(checkpoint: Path, gone: str) -> None:
    """A folder without configuration or weights is refused by the name of what it lacks."""
    (checkpoint / gone).unlink()
    with pytest.raises(CheckpointError, match=rf"a checkpoint folder must hold {gone}"):
        load_target(checkpoint)


def test_a_missing_key_of_config_json_is_named(checkpoint: Path) -> None:
    """config.json without a size says which."""
    raw = json.loads((checkpoint / "config.json").read_text())
    del raw["intermediate_size"]
    (checkpoint / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"config\.json must hold intermediate_size, it does not"):
        load_target(checkpoint)


def test_shards_round_trip(checkpoint: Path, tmp_path: Path) -> None:
    """Tensors written in three shards with their index come back bit for bit; a lost shard is named."""
    tensors = hf_tensors(load_target(checkpoint), torch.float32)
    folder = tmp_path / "sharded"
    save_tensors(tensors, folder, num_shards=3)
    again = read_tensors(folder)
    assert again.keys() == load_file(checkpoint / "model.safetensors").keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the index names model-00002-of-00003\.safetensors"):
        read_tensors(folder)


def test_end_of_text_ids_come_from_both_configurations(checkpoint: Path) -> None:
    """eos ids may be one number or a list, and generation_config.json wins."""
    edit_config(checkpoint, eos_token_id=3)
    assert load_target(checkpoint).config.eos_token_ids == (3,)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert load_target(checkpoint).config.eos_token_ids == (3, 5)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b'{"hidden_size": 32,', r"config\.json must be JSON \(.*line 1.*\): fetch it again$"),
        ("config.json", b"\xff\xfe", r"config\.json must be JSON \(.*\): fetch it again$"),
        ("config.json", b"[1, 2]", r"config\.json must hold a JSON object, got list$"),
        ("generation_config.json", b"", r"generation_config\.json must be JSON"),
        ("model.safetensors", b"", r"model\.safetensors must be a whole safetensors file \(.*\): fetch it again$"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "must be a whole safetensors file"),
    ],
)
def test_a_damaged_file_is_named(checkpoint: Path, name: str, content: bytes, words: str) -> None:
    """Broken JSON, JSON of another kind, empty weights and a pointer in place of them each have a sentence."""
    (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        load_target(checkpoint)


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_truncated_weights_are_refused(checkpoint: Path, kept: float) -> None:
    """A safetensors file that ends early is refused, whether its header or its data is cut."""
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be a whole safetensors file"):
        load_target(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_weights_of_another_dtype_are_refused(checkpoint: Path, dtype: torch.dtype) -> None:
    """Quantized or integer weights are refused by name, with the dtypes that are read."""
    edit_tensors(checkpoint, lambda tensors: tensors.update({LAYER0_Q: tensors[LAYER0_Q].to(dtype)}))
    words = rf"{LAYER0_Q} must be one of float16, .*, got {str(dtype)[6:]}: load the checkpoint that was not quantized$"
    with pytest.raises(CheckpointError, match=words):
        load_target(checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "32"}, "hidden_size must be a positive whole number, got '32'"),
        ({"num_attention_heads": 0}, "num_heads must be a positive whole number, got 0"),
        ({"num_hidden_layers": 8.5}, "num_layers must be a positive whole number, got 8.5"),
        ({"vocab_size": -1}, "vocab_size must be a positive whole number, got -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive whole number, got 0"),
        ({"rope_scaling": "linear"}, r"config\.json must hold values of the expected kinds: "),
        ({"quantization_config": "awq"}, r"config\.json must hold values of the expected kinds: "),
        ({"architectures": 3}, r"config\.json must hold values of the expected kinds: "),
        ({"eagle_config": 3}, r"config\.json must hold values of the expected kinds: "),
    ],
)
def test_values_of_the_wrong_kind_are_refused(checkpoint: Path, changes: dict, words: str) -> None:
    """Strings, fractions and zeros where sizes belong end in a sentence, not in a traceback of ours."""
    edit_config(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_target(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "ea_model.pt"])
def test_pickled_weights_are_never_opened(checkpoint: Path, name: str) -> None:
    """A folder with pickled weights alone is refused with the way to convert them, and the pickle is not run."""
    (checkpoint / "model.safetensors").unlink()
    marker = checkpoint / "was_run"
    (checkpoint / name).write_bytes(f"cos\nmkdir\n(V{marker}\ntR.".encode())  # a pickle that makes a folder
    with pytest.raises(CheckpointError, match=rf"weights must be safetensors, .* holds {name}, .*save_file"):
        load_target(checkpoint)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{}", "must hold a weight_map from tensor names to files, it does not"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', r"must name files of its own folder, got \.\./outside"),
        ('{"weight_map": ', "must be JSON"),
    ],
)
def test_a_broken_index_is_refused(checkpoint: Path, index: str, words: str) -> None:
    """An index without its map, with paths out of the folder, or cut off is refused."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=words):
        load_target(checkpoint)


def test_the_error_is_one_of_ours() -> None:
    """CheckpointError is caught both as kvcanary's base error and as a ValueError."""
    assert issubclass(CheckpointError, KVCanaryError)
    assert issubclass(CheckpointError, ValueError)
