"""The files of a Hugging Face checkpoint folder: JSON and safetensors, in and out. Pickles are never opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_engine.models.config import CheckpointError, read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


#: Which part of a tensor of this name and shape is wanted, an index by dimension.
Part = Callable[[str, Sequence[int]], tuple[slice, ...]]


def read_tensors(folder: str | Path, part: Part | None = None) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, by name; CheckpointError where a file is absent or damaged.

    part: of each nothing else is read.
    """
    tensors: dict[str, Tensor] = {}
    for shard in _shards(Path(folder)):
        try:
            with safe_open(shard, framework="pt", device="cpu") as file:
                tensors |= {name: _read(file, name, part) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise CheckpointError(f"{shard} must be a whole safetensors file ({error}): fetch it again") from None
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


def _read(file: Any, name: str, part: Part | None) -> Tensor:
    if part is None:
        return file.get_tensor(name)
    stored = file.get_slice(name)
    wanted = part(name, stored.get_shape())
    return stored[wanted] if wanted else file.get_tensor(name)


def _shards(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise CheckpointError(_no_weights(folder))
    shards = [folder / name for name in _shard_names(folder / _INDEX)]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"the index names {shard.name}, {folder} does not hold it")
    return shards


def _shard_names(index: Path) -> list[str]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must hold a weight_map from tensor names to files, it does not")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} must name files of its own folder, got {name}")
    return names


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickled:
        return (
            f"weights must be safetensors, {folder} holds {pickled[0]}, a pickle, which is never opened here: "
            "convert it once where you trust it, with "
            f"safetensors.torch.save_file(torch.load(..., weights_only=True), {_SINGLE!r})"
        )
    return f"a checkpoint folder must hold {_SINGLE} or {_INDEX}, {folder} holds neither"
