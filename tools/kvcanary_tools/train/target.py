"""Trains the target: next-token loss on shuffled files, checkpointed, resumable to the very same weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcanary_tools.train.data import Documents, EpochBlocks, step_length
from kvcanary_tools.train.dense import CausalKV
from kvcanary_tools.train.graphed import GraphedStep
from kvcanary_tools.train.optimizer import Optimizer, learning_rate
from kvcanary_tools.train.settings import Settings
from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder

EVERY = 100  # steps between two points of the curve


def train_target(
    settings: Settings,
    vocab_size: int,
    train: Documents,
    held_out: Documents,
    checkpoint: Path,
    device: torch.device,
    max_seconds: float = 500.0,
    stop_after: int | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Trains until done, out of time or `stop_after` steps; True when the checkpoint is finished."""
    started = time.monotonic()
    model = new_target(settings, vocab_size).to(device)
    optimizer = Optimizer(model, settings.matrix_lr, settings.vector_lr, settings.weight_decay)
    blocks = EpochBlocks(train, settings.context_len, settings.seed, device)
    per_step = max(1, settings.step_tokens // settings.context_len)
    num_steps = math.ceil(settings.epochs * blocks.per_epoch / per_step)
    step, curve, spent = resume(checkpoint, model, optimizer)
    if device.type == "cuda":
        compile_layers(model)
    run_step = GraphedStep(
        lambda blocks, length: next_token_loss(model, blocks, length, settings.dropout)[None], list(model.parameters())
    )
    losses = []
    while step < num_steps and time.monotonic() - started < max_seconds and step != stop_after:
        batch = blocks.take(step, per_step)
        length = step_length(settings.seed, step, settings.lengths)
        torch.manual_seed(settings.seed * 1_000_003 + step)
        losses.append(run_step(batch, length))
        clip(model)
        optimizer.step(learning_rate(step, num_steps, settings.warmup_steps, settings.cooldown))
        step += 1
        if step % EVERY == 0 or step == num_steps:
            point = {"step": step, "train_loss": float(torch.stack(losses).mean())}
            losses = []
            if step % (5 * EVERY) == 0 or step == num_steps:
                point["held_out_loss"] = held_out_loss(model, held_out)
            point["seconds"] = round(spent + time.monotonic() - started, 1)
            curve.append(point)
            say(f"target step {step}/{num_steps} {point}")
    save(checkpoint, model, optimizer, step, curve, spent + time.monotonic() - started, done=step >= num_steps)
    return step >= num_steps


def new_target(settings: Settings, vocab_size: int) -> Decoder:
    """A fresh target: layers start as the identity, so that depth costs nothing at the beginning."""
    torch.manual_seed(settings.seed)
    model = Decoder(parse_config(settings.target_config(vocab_size, 0)))
    initialise(model)
    return model


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Norms 1, biases 0, tables at 0.03, matrices by fan-in, and what ends a residual branch at 0."""
    for name, parameter in module.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last.endswith("norm_weight"):
            parameter.fill_(1.0)
        elif last.endswith("bias") or last in ("o_weight", "down_weight"):
            parameter.zero_()
        elif last in ("embed_weight", "lm_head_weight"):
            parameter.normal_(0.0, 0.03)
        else:
            parameter.normal_(0.0, 0.7 * parameter.shape[1] ** -0.5)


def next_token_loss(model: Decoder, blocks: Tensor, length: int, dropout: float = 0.0) -> Tensor:
    """Mean cross-entropy of blocks [count, block_len + 1], read as rows of `length` tokens."""
    inputs, labels = blocks[:, :-1].reshape(-1), blocks[:, 1:].reshape(-1)
    rows = inputs.shape[0] // length
    positions = torch.arange(length, device=inputs.device).repeat(rows)
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        hidden = model(inputs, positions, CausalKV(rows, length, dropout)).hidden
        logits = model.logits(hidden)
    return F.cross_entropy(logits.float(), labels)


@torch.no_grad()
def held_out_loss(model: Decoder, documents: Documents, length: int = 1024, batch: int = 32) -> float:
    """Mean loss in nats per token over all held-out files, in windows of `length`."""
    length = min(length, model.config.max_position_embeddings)
    stream = torch.from_numpy(documents.tokens).to(model.embed_weight.device)
    blocks = stream.unfold(0, length + 1, length)
    parts = [next_token_loss(model, part.long(), length) * len(part) for part in blocks.split(batch)]
    return float(torch.stack(parts).sum() / len(blocks))


def clip(model: nn.Module, limit: float = 1.0) -> None:
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], limit)


def compile_layers(model: Decoder) -> None:
    """Compiles the two halves of a layer once for all layers; attention between them stays as it is."""
    for layer in model.layers:
        layer.project = torch.compile(layer.project)
        layer.finish = torch.compile(layer.finish)


def save(
    path: Path, model: nn.Module, optimizer: Optimizer, step: int, curve: list, seconds: float, done: bool
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "curve": curve}
    temporary = path.with_suffix(".tmp")
    torch.save(state | {"seconds": seconds, "done": done}, temporary)
    temporary.replace(path)


def resume(path: Path, model: nn.Module, optimizer: Optimizer) -> tuple[int, list[dict[str, Any]], float]:
    """Loads a checkpoint where there is one; returns step, curve and the seconds spent."""
    if not path.is_file():
        return 0, [], 0.0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["curve"], state["seconds"]
