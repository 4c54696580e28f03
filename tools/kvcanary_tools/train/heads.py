"""Trains the EAGLE and EAGLE-3 heads on the frozen target: its distributions, over corpus text and over its own output.

Both heads see training-time test: each position starts a chain of drafts that feeds the head its own hidden
states, as drafting will, and every link of the chain is graded against the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcanary_tools.train.data import Documents, EpochBlocks
from kvcanary_tools.train.dense import CausalKV, ChainKV, continue_greedily
from kvcanary_tools.train.graphed import GraphedStep
from kvcanary_tools.train.optimizer import Optimizer, learning_rate
from kvcanary_tools.train.settings import Settings
from kvcanary_tools.train.target import clip, compile_layers, initialise, resume, save
from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder, DecoderOutput
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3

EVERY = 100


def train_head(
    kind: str,
    settings: Settings,
    target: Decoder,
    train: Documents,
    generated: Tensor,
    checkpoint: Path,
    max_seconds: float = 500.0,
    stop_after: int | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Trains the head of `kind` until done or out of time; True when the checkpoint is finished."""
    started = time.monotonic()
    device = target.embed_weight.device
    head = new_head(kind, settings, target, train)
    optimizer = Optimizer(head, settings.head_matrix_lr, settings.head_vector_lr, settings.head_weight_decay)
    rows = HeadRows(settings, train, generated)
    num_steps = max(1, int(settings.head_epochs * len(rows) * settings.head_len / settings.head_step_tokens))
    step, curve, spent = resume(checkpoint, head, optimizer)

    def losses_of(batch: Tensor, key: None) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output, logits = teacher(target, batch, head.tap_layers)
            loss, agreement = head_loss(head, output, logits, batch, settings)
        return torch.cat((loss[None], agreement))

    run_step = GraphedStep(losses_of, list(head.parameters()))
    losses = []
    while step < num_steps and time.monotonic() - started < max_seconds and step != stop_after:
        batch = rows.take(step, settings.head_step_tokens // settings.head_len).to(device)
        losses.append(run_step(batch))
        clip(head)
        optimizer.step(learning_rate(step, num_steps, settings.warmup_steps, settings.cooldown))
        step += 1
        if step % EVERY == 0 or step == num_steps:
            loss_mean, *agree = (round(float(x), 4) for x in torch.stack(losses).mean(0))
            losses = []
            curve.append(
                {
                    "step": step,
                    "loss": loss_mean,
                    "agreement": agree,
                    "seconds": round(spent + time.monotonic() - started, 1),
                }
            )
            say(f"{kind} step {step}/{num_steps} {curve[-1]}")
    save(checkpoint, head, optimizer, step, curve, spent + time.monotonic() - started, done=step >= num_steps)
    return step >= num_steps


def new_head(kind: str, settings: Settings, target: Decoder, train: Documents) -> Eagle | Eagle3:
    torch.manual_seed(settings.seed + 1)
    vocab_size = target.config.vocab_size
    head: Eagle | Eagle3
    if kind == "eagle":
        head = Eagle(parse_config(settings.eagle_config(vocab_size, 0)), target)
    else:
        head = Eagle3(parse_config(settings.eagle3_config(vocab_size, 0)), target)
        frequent = np.argsort(-np.bincount(train.tokens, minlength=vocab_size), kind="stable")
        ids = torch.from_numpy(np.sort(frequent[: settings.draft_vocab_size]))
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.t2d[ids] = True
    initialise(head)
    if isinstance(head, Eagle3):
        with torch.no_grad():
            head.lm_head_weight.copy_(target.embed_weight[ids.to(target.embed_weight.device)])
    return head.to(target.embed_weight.device)


def generate_rows(settings: Settings, target: Decoder, train: Documents) -> Tensor:
    """Rows of `head_len` + 1 tokens: corpus prompts, continued greedily by the target."""
    device = target.embed_weight.device
    blocks = EpochBlocks(train, settings.generated_prompt_len, settings.seed + 2, torch.device("cpu"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = target.to(dtype)
    num_new = settings.head_len + 1 - settings.generated_prompt_len
    rows = []
    for first in range(0, settings.generated_prompts, settings.generated_batch):
        prompts = blocks.take(first // settings.generated_batch, settings.generated_batch)[:, :-1].to(device)
        rows.append(torch.cat((prompts, continue_greedily(model, list(prompts), num_new, dtype)), 1).cpu())
    return torch.cat(rows)


def frozen_target(
    checkpoint: Path, settings: Settings, vocab_size: int, device: torch.device, compiled: bool
) -> Decoder:
    model = Decoder(parse_config(settings.target_config(vocab_size, 0)))
    model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["model"])
    # What is served is bfloat16: the heads learn from exactly those weights.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model = model.to(device).requires_grad_(False).eval()
    if compiled:
        compile_layers(model)
    return model


@torch.no_grad()
def teacher(target: Decoder, rows: Tensor, tap_layers: tuple[int, ...]) -> tuple[DecoderOutput, Tensor]:
    """The target's hidden states and logits over rows [b, l + 1] (the last token is only a label)."""
    inputs = rows[:, :-1]
    positions = torch.arange(inputs.shape[1], device=rows.device).repeat(len(rows))
    output = target(inputs.flatten(), positions, CausalKV(*inputs.shape), tap_layers)
    return output, target.logits(output.hidden).float()


def head_loss(
    head: Eagle | Eagle3, output: DecoderOutput, logits: Tensor, rows: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """The weighted loss over all links, and for each link how often head and target agree on the most probable token.

    Chain p, link j reads token p+1+j at position p+j and is graded by the target's distribution at p+1+j.
    """
    batch, length = len(rows), rows.shape[1] - 1
    columns = torch.arange(length, device=rows.device)
    hidden, kv = head.features(output), ChainKV(batch, length)
    probs, in_vocab = _draft_probs(head, logits, settings.greedy_label)
    probs, in_vocab = probs.unflatten(0, (batch, length)), in_vocab.unflatten(0, (batch, length))
    best = probs.argmax(-1)
    wanted_hidden = output.hidden.unflatten(0, (batch, length))
    total = torch.zeros((), device=rows.device)
    agreement = []
    for link in range(settings.head_unroll):
        ahead = (columns + 1 + link).clamp(max=length - 1)
        valid = (columns + 1 + link < length) & in_vocab[:, ahead]
        hidden = head(rows[:, ahead].flatten(), hidden, (columns + link).repeat(batch), kv)
        draft = F.log_softmax(head.logits(hidden).float(), -1).unflatten(0, (batch, length))
        loss = -(probs[:, ahead] * draft).sum(-1)
        if head.kind == "eagle":
            features = hidden.float().unflatten(0, (batch, length))
            loss = loss + settings.feature_loss * F.smooth_l1_loss(
                features, wanted_hidden[:, ahead].float(), reduction="none"
            ).mean(-1)
        total = total + settings.head_unroll_decay**link * (loss * valid).sum() / valid.sum()
        agreement.append(
            ((draft.argmax(-1) == best[:, ahead]) & valid).sum() / (columns + 1 + link < length).sum() / batch
        )
    return total, torch.stack(agreement).detach()


class HeadRows:
    """Rows of `head_len` + 1 tokens: every generated row once an epoch, and as many cut from the corpus."""

    def __init__(self, settings: Settings, train: Documents, generated: Tensor) -> None:
        self.generated = generated
        self.corpus = EpochBlocks(train, settings.head_len, settings.seed + 3, torch.device("cpu"))
        self.seed = settings.seed

    def __len__(self) -> int:
        return 2 * len(self.generated)

    def take(self, step: int, count: int) -> Tensor:
        half = count // 2
        pick = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        rows = torch.randperm(len(self.generated), generator=pick)[: count - half]
        return torch.cat((self.generated[rows], self.corpus.take(step, half)))


def _draft_probs(head: nn.Module, logits: Tensor, greedy: float) -> tuple[Tensor, Tensor]:
    """What the head shall say over its vocabulary, and whether the target's most probable token is in it.

    The target's distribution, blended with its most probable token: a tree is kept by products of these numbers,
    and under greedy decoding what counts is how likely a token is to be the one chosen.
    """
    if head.kind == "eagle":
        in_vocab = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    else:
        in_vocab = head.t2d[logits.argmax(-1)]
        logits = logits[:, head.to_target_ids(torch.arange(head.num_draft_vocab, device=logits.device))]
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.lerp(probs, chosen, greedy), in_vocab
