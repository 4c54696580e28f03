"""Hugging Face checkpoint folders in and out: safetensors shards, with every tensor accounted for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from spec_engine.models.config import (
    EAGLE3_ARCHITECTURES,
    EAGLE_ARCHITECTURES,
    TARGET_ARCHITECTURES,
    CheckpointError,
    ModelConfig,
    load_config,
)
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3, marks
from spec_engine.models.files import read_tensors
from spec_engine.models.hybrid import HybridDecoder
from spec_engine.models.qwen3_5 import as_ours
from spec_engine.models.sharding import part_of, without_others
from spec_engine.models.standalone import Standalone

Draft = Eagle | Eagle3 | Standalone
AnyModel = TypeVar("AnyModel", bound=Decoder | Eagle | Eagle3)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16)


def load_target(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shard: tuple[int, int] = (0, 1),
) -> Decoder:
    """Loads a llama-family checkpoint for inference; raises a CheckpointError that names what does not fit.

    shard: rank and number of ranks; what others hold is not read. `reduce_over` then says with whom layers sum.
    """
    config = load_config(folder)
    if config.architecture not in TARGET_ARCHITECTURES:
        raise CheckpointError(f"a target must be one of {', '.join(TARGET_ARCHITECTURES)}, got {config.architecture}")
    if shard != (0, 1):
        config = config.shard(*shard)
    tensors = without_others(read_tensors(folder, part_of(config)), config)
    if config.delta is not None:
        tensors = as_ours(tensors, config)
    with torch.device("meta"):
        model = Decoder(config) if config.delta is None else HybridDecoder(config)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some checkpoints store the tied matrix twice
    return _filled(model, tensors, folder, dtype, device)


def shard_target(whole: Decoder, rank: int, num_ranks: int) -> Decoder:
    """The part of a model in memory that one rank holds, as `load_target` gives it of a folder."""
    config, like = whole.config.shard(rank, num_ranks), whole.embed_weight
    part = part_of(config)
    tensors = hf_tensors(whole, like.dtype)
    if part is not None:
        tensors = {name: tensor[part(name, tensor.shape)] for name, tensor in tensors.items()}
    with torch.device("meta"):
        model = Decoder(config)
    return _filled(model, without_others(tensors, config), "the whole model", like.dtype, like.device)


def load_draft(
    folder: str | Path, target: Decoder, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Eagle | Eagle3:
    """Loads an EAGLE or EAGLE-3 head for `target`, whose embedding (and for EAGLE lm_head) it shares.

    Heads are published under their own architecture names and under the target's (yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    calls itself LlamaForCausalLM); then the tensors say which kind it is. However many layers config.json counts, a
    head has one.
    """
    config = replace(load_config(folder), num_layers=1)
    tensors = _head_tensors(folder)
    own_embedding = "embed_tokens.weight" in tensors
    if not _is_eagle3(config.architecture, tensors, folder):
        with torch.device("meta"):
            eagle = Eagle(config, target, "fc.bias" in tensors, own_embedding)
        return _filled(eagle, tensors, folder, dtype, device)
    tensors = _eagle3_tensors(tensors, config, target, folder)
    with torch.device("meta"):
        eagle3 = Eagle3(config, target, own_embedding)
    eagle3 = _filled(eagle3, tensors, folder, dtype, device)
    eagle3.check_vocabulary()
    return eagle3


def load_standalone(
    folder: str | Path, target: Decoder, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Standalone:
    """Loads a small model of the target's vocabulary as its draft."""
    return Standalone(load_target(folder, dtype, device), target)


def hf_tensors(model: Decoder | Eagle | Eagle3, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The model's tensors under their Hugging Face names: what `load_target` and `load_draft` read back."""
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {}
    for name, parts in model.hf_names().items():
        rows = ours[name].detach().cpu().split([rows for _, rows in parts])
        for (hf_name, _), tensor in zip(parts, rows, strict=True):
            tensors[hf_name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().clone()
    return tensors


def _head_tensors(folder: str | Path) -> dict[str, Tensor]:
    """A head's tensors without the prefix `model.` that some writers put before every name."""
    return _renamed(read_tensors(folder), lambda name: name.removeprefix("model."), folder)


def _is_eagle3(architecture: str, tensors: dict[str, Tensor], folder: str | Path) -> bool:
    if architecture in EAGLE_ARCHITECTURES + EAGLE3_ARCHITECTURES:
        return architecture in EAGLE3_ARCHITECTURES
    if "fc.weight" not in tensors:
        raise CheckpointError(f"a draft head must hold fc.weight, {folder} does not: it holds a whole model or no head")
    return any(name.endswith("hidden_norm.weight") for name in tensors)


def _renamed(tensors: dict[str, Tensor], rename: Callable[[str], str], folder: str | Path) -> dict[str, Tensor]:
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        names = sorted(name for name in tensors if name != rename(name) and rename(name) in tensors)
        raise CheckpointError(f"{folder} must name each tensor once, it holds {names[0]} and {rename(names[0])}")
    return renamed


def _eagle3_tensors(
    tensors: dict[str, Tensor], config: ModelConfig, target: Decoder, folder: str | Path
) -> dict[str, Tensor]:
    """Under our names, and with what heads may leave out: t2d, and with a full draft vocabulary d2t and lm_head."""
    tensors = _renamed(tensors, _midlayer, folder)
    if config.draft_vocab_size == config.vocab_size:
        tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        tensors.setdefault("lm_head.weight", target.lm_head_weight)
    if "d2t" in tensors:
        tensors.setdefault("t2d", marks(tensors["d2t"], config.vocab_size))
    return tensors


def _midlayer(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _filled(
    model: AnyModel, tensors: dict[str, Tensor], folder: str | Path, dtype: torch.dtype, device: str | torch.device
) -> AnyModel:
    names = model.hf_names()
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    _check_names({name for parts in names.values() for name, _ in parts}, set(tensors), folder)
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    filled = {}
    for name, parts in names.items():
        shapes = [(rows, *ours[name].shape[1:]) for _, rows in parts]
        for (hf_name, _), shape in zip(parts, shapes, strict=True):
            _check_tensor(hf_name, tensors[hf_name], shape, ours[name].dtype)
        stacked = tensors[parts[0][0]] if len(parts) == 1 else torch.cat([tensors[hf_name] for hf_name, _ in parts])
        filled[name] = stacked.to(device, dtype if stacked.is_floating_point() else ours[name].dtype, copy=True)
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
    problems = []
    for what, names in (("missing", sorted(wanted - found)), ("surplus", sorted(found - wanted))):
        if names:
            problems.append(f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")
    if problems:
        raise CheckpointError(f"{folder} must hold exactly the tensors its config.json implies; {'; '.join(problems)}")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shape exactly; of dtypes any plain float for weights, any integer for indices, bool for marks."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    known = _INTEGERS if dtype == torch.int64 else (torch.bool,) if dtype == torch.bool else _FLOATS
    if tensor.dtype not in known:
        choices = ", ".join(_name(one) for one in known)
        raise CheckpointError(
            f"{name} must be one of {choices}, got {_name(tensor.dtype)}: load the checkpoint that was not quantized"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
