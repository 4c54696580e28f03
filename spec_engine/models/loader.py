"""Hugging Face checkpoint folders in and out: safetensors shards, with every tensor accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from spec_engine.models.config import (
    EAGLE3_ARCHITECTURES,
    EAGLE_ARCHITECTURES,
    TARGET_ARCHITECTURES,
    CheckpointError,
    load_config,
)
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3

Draft = Eagle | Eagle3
AnyModel = TypeVar("AnyModel", bound=Decoder | Eagle | Eagle3)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_target(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """Loads a llama-family checkpoint for inference; raises a CheckpointError that names what does not fit."""
    config = load_config(folder)
    if config.architecture not in TARGET_ARCHITECTURES:
        raise CheckpointError(f"a target must be one of {', '.join(TARGET_ARCHITECTURES)}, got {config.architecture}")
    tensors = read_tensors(folder)
    with torch.device("meta"):
        model = Decoder(config)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some checkpoints store the tied matrix twice
    return _filled(model, tensors, folder, dtype, device)


def load_draft(
    folder: str | Path, target: Decoder, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Draft:
    """Loads an EAGLE or EAGLE-3 head for `target`, whose embedding (and for EAGLE lm_head) it shares."""
    config = load_config(folder)
    tensors = read_tensors(folder)
    own_embedding = "embed_tokens.weight" in tensors
    with torch.device("meta"):
        if config.architecture in EAGLE3_ARCHITECTURES:
            draft: Draft = Eagle3(config, target, own_embedding)
        elif config.architecture in EAGLE_ARCHITECTURES:
            draft = Eagle(config, target, "fc.bias" in tensors, own_embedding)
        else:
            known = EAGLE_ARCHITECTURES + EAGLE3_ARCHITECTURES
            raise CheckpointError(f"a draft head must be one of {', '.join(known)}, got {config.architecture}")
    return _filled(draft, tensors, folder, dtype, device)


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, by name."""
    tensors: dict[str, Tensor] = {}
    for shard in _shards(Path(folder)):
        with safe_open(shard, framework="pt", device="cpu") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def hf_tensors(model: Decoder | Draft, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The model's tensors under their Hugging Face names: what `load_target` and `load_draft` read back."""
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {}
    for name, parts in model.hf_names().items():
        rows = ours[name].detach().cpu().split([rows for _, rows in parts])
        for (hf_name, _), tensor in zip(parts, rows, strict=True):
            tensors[hf_name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().clone()
    return tensors


def save_tensors(tensors: dict[str, Tensor], folder: str | Path, num_shards: int = 1) -> None:
    """Writes one model.safetensors, or `num_shards` of about equal size with their index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(tensors, folder / _SINGLE, metadata=metadata)
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    written = 0
    for name, tensor in tensors.items():
        shards[min(written * num_shards // total, num_shards - 1)][name] = tensor
        written += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        save_file(shard, folder / file_name, metadata=metadata)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"a checkpoint folder must hold {_SINGLE} or {_INDEX}, {folder} holds neither")
    weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    shards = [folder / name for name in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"the index names {shard.name}, {folder} does not hold it")
    return shards


def _filled(
    model: AnyModel, tensors: dict[str, Tensor], folder: str | Path, dtype: torch.dtype, device: str | torch.device
) -> AnyModel:
    names = model.hf_names()
    _check_names({name for parts in names.values() for name, _ in parts}, set(tensors), folder)
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    filled = {}
    for name, parts in names.items():
        shapes = [(rows, *ours[name].shape[1:]) for _, rows in parts]
        for (hf_name, _), shape in zip(parts, shapes, strict=True):
            if tuple(tensors[hf_name].shape) != shape:
                raise CheckpointError(f"{hf_name} must have shape {list(shape)}, got {list(tensors[hf_name].shape)}")
        stacked = tensors[parts[0][0]] if len(parts) == 1 else torch.cat([tensors[hf_name] for hf_name, _ in parts])
        filled[name] = stacked.to(device, dtype if stacked.is_floating_point() else stacked.dtype, copy=True)
    if isinstance(model, Decoder) and model.config.tie_word_embeddings:
        filled["lm_head_weight"] = filled["embed_weight"]
    model.load_state_dict(filled, assign=True)
    model = model.to(device=device, dtype=dtype).requires_grad_(False).eval()
    if torch.device(device).type == "cpu":
        _lay_out_for_few_rows(model)
    return model


def _lay_out_for_few_rows(model: nn.Module) -> None:
    """Store each product's matrix input-major, same shape: on a CPU products of 1 to 16 rows take half the time."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and name != "embed_weight":
            weight.data = weight.data.t().contiguous().t()
    if (
        isinstance(model, Decoder) and model.config.tie_word_embeddings
    ):  # rows are looked up in one, multiplied by the other
        model.lm_head_weight = nn.Parameter(model.embed_weight.data.t().contiguous().t(), requires_grad=False)


def _check_names(wanted: set[str], found: set[str], folder: str | Path) -> None:
    found = {name for name in found if not name.endswith("rotary_emb.inv_freq")}
    problems = []
    for what, names in (("missing", sorted(wanted - found)), ("surplus", sorted(found - wanted))):
        if names:
            problems.append(f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")
    if problems:
        raise CheckpointError(f"{folder} must hold exactly the tensors its config.json implies; {'; '.join(problems)}")
