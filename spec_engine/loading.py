"""The models that an engine runs: read from the folders that its config names, or handed over ready-made."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup, get_rank, get_world_size

from spec_engine.config import EngineConfig
from spec_engine.errors import ConfigError
from spec_engine.models.decoder import Decoder
from spec_engine.models.embedded import embedded_model
from spec_engine.models.loader import Draft, load_draft, load_standalone, load_target
from spec_engine.models.sharding import reduce_over
from spec_engine.models.tokenizer import Tokenizer


class Models(NamedTuple):
    """Target, what drafts for it (None: nothing), and the tokenizer of both."""

    target: Decoder
    draft: Draft | None
    tokenizer: Tokenizer


def load_models(
    config: EngineConfig,
    device: torch.device,
    target: Decoder | None = None,
    draft: Draft | None = None,
    tokenizer: Tokenizer | None = None,
    ranks: ProcessGroup | None = None,
) -> Models:
    """What is given is taken as it is, in the config's dtype on its device; the rest is loaded.

    ranks: each loads its part of the target, whose layers sum over the default process group; a draft is whole on all.
    ConfigError for a given target without its tokenizer, a draft beside draft "none", a head that is not there.
    """
    folder = None
    if target is None:
        folder = embedded_model() if config.model == "embedded" else Path(config.model)
        shard = (0, 1) if ranks is None else (get_rank(ranks), get_world_size(ranks))
        target = load_target(folder, dtype_of(config), device, shard)
        target = target if ranks is None else reduce_over(target)
    if tokenizer is None:
        if folder is None:
            raise ConfigError("a ready-made model needs its tokenizer, got none", "pass tokenizer=")
        tokenizer = Tokenizer.from_folder(folder)
    if draft is None:
        draft = _load_draft(config, folder, target, device)
    elif config.draft == "none":
        raise ConfigError("a ready-made draft needs a config that drafts, got draft 'none'", "use draft='auto'")
    return Models(target, draft, tokenizer)


def dtype_of(config: EngineConfig) -> torch.dtype:
    """Number type of weights and cache."""
    return torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)


def _load_draft(config: EngineConfig, model_folder: Path | None, target: Decoder, device: torch.device) -> Draft | None:
    folder = _draft_folder(config, model_folder)
    if folder is None:
        return None
    load = load_standalone if config.draft == "standalone" else load_draft
    return load(folder, target, dtype_of(config), device)


def _draft_folder(config: EngineConfig, model_folder: Path | None) -> Path | None:
    """Where the draft lies; None for no drafting. ConfigError when the one asked for is not there."""
    if config.draft == "none":
        return None
    if config.draft_model is not None:
        return Path(config.draft_model)
    if config.draft == "standalone":
        raise ConfigError(
            "draft 'standalone' needs draft_model, got none",
            "name the folder of a small model that has the target's vocabulary",
        )
    kinds = ("eagle3", "eagle") if config.draft == "auto" else (config.draft,)
    for kind in kinds:
        if model_folder is not None and (model_folder / kind / "config.json").is_file():
            return model_folder / kind
    if config.draft == "auto":
        return None
    raise ConfigError(
        f"{model_folder or 'a ready-made model'} holds no {config.draft} head",
        "pass draft_model=FOLDER, or draft='none'",
    )
