"""Muon for matrices, AdamW for everything else, and the learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Optimizer:
    """Muon on two-dimensional layer weights, AdamW on embeddings, norms and output heads."""

    def __init__(self, model: nn.Module, matrix_lr: float, vector_lr: float, weight_decay: float) -> None:
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_table = parameter.ndim < 2 or "embed" in name or "lm_head" in name
                (others if is_table else matrices).append(parameter)
        self.muon = Muon(matrices, matrix_lr, weight_decay)
        self.vector_lr = vector_lr
        groups = [
            {"params": [p for p in others if p.ndim == 2], "weight_decay": weight_decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = any(p.is_cuda for p in others)
        self.adamw = torch.optim.AdamW(groups, lr=vector_lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)

    def step(self, scale: float) -> None:
        self.muon.step(scale)
        for group in self.adamw.param_groups:
            group["lr"] = self.vector_lr * scale
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.momentum, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for ours, theirs in zip(self.muon.momentum, state["muon"], strict=True):
            ours.copy_(theirs)
        self.adamw.load_state_dict(state["adamw"])


class Muon:
    """Momentum whose every matrix is made near-orthogonal before it is applied; equal shapes go in one batch."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        self.lr, self.weight_decay, self.beta = lr, weight_decay, momentum
        shapes = sorted({tuple(matrix.shape) for matrix in matrices})
        self.groups = [[matrix for matrix in matrices if tuple(matrix.shape) == shape] for shape in shapes]
        self.momentum = [torch.zeros_like(torch.stack([m.detach() for m in group])) for group in self.groups]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            gradient = torch.stack([matrix.grad for matrix in group])
            momentum.lerp_(gradient, 1 - self.beta)
            update = orthogonalise(gradient.lerp(momentum, self.beta))
            rows, columns = gradient.shape[1:]
            lr = self.lr * scale
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-lr * max(1.0, rows / columns) ** 0.5)
            for matrix in group:
                matrix.grad = None


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: [g, rows, columns] -> the same with all singular values near one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        product = x @ x.transpose(1, 2)
        x = a * x + (b * product + c * product @ product) @ x
    return (x.transpose(1, 2) if tall else x).to(matrices.dtype)


def learning_rate(step: int, num_steps: int, warmup_steps: int, cooldown: float) -> float:
    """Rises over the warmup, stays, and falls linearly to zero over the last `cooldown` of the steps."""
    rise = min(1.0, (step + 1) / max(1, warmup_steps))
    fall = min(1.0, (num_steps - step) / max(1.0, cooldown * num_steps))
    return rise * fall
