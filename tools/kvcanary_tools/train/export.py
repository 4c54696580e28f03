"""Writes the trained weights as Hugging Face folders: the target in two shards, a folder for each head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kvcanary_tools.train.settings import Settings
from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3
from spec_engine.models.files import save_tensors
from spec_engine.models.loader import hf_tensors


def export_target(checkpoint: Path, settings: Settings, vocab_size: int, folder: Path, num_shards: int = 2) -> None:
    config = settings.target_config(vocab_size, 0)
    model = Decoder(parse_config(config))
    model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["model"])
    save_tensors(hf_tensors(model), folder, num_shards)
    write_json(folder / "config.json", config)
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "do_sample": False}
    write_json(folder / "generation_config.json", generation)


def export_head(kind: str, checkpoint: Path, settings: Settings, target: Decoder, folder: Path) -> None:
    vocab_size = target.config.vocab_size
    config = settings.eagle_config(vocab_size, 0) if kind == "eagle" else settings.eagle3_config(vocab_size, 0)
    head = (Eagle if kind == "eagle" else Eagle3)(parse_config(config), target)
    head.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["model"])
    save_tensors(hf_tensors(head), folder)
    write_json(folder / "config.json", config)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
