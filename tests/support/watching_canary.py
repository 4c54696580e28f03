"""What recurrent states see of the canary of a watched engine with two rows."""

from __future__ import annotations

import functools
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from kvcanary.calls.coverage import Coverage
from kvcanary_kernels.watch.walk import TAILS, Truth


def watching_canary(content: str, device: str = "cpu") -> Any:
    """Requests "a" and "b" have rows 0 and 1 and the numbers 11 and 12; nothing has been stored."""
    zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
    truth = Truth(zeros(2, TAILS + 2))
    truth.uids[:], truth.ends[:] = torch.tensor([11, 12]), 0
    memory = SimpleNamespace(seed=3, truth=truth, total=zeros(1), upload=functools.partial(_upload, device))
    return SimpleNamespace(
        memory=memory, launches=SimpleNamespace(seeds=zeros(2, 2)), step=0, events=[],
        config=SimpleNamespace(content=content), coverage=Coverage(), groups=[0], steps=deque(maxlen=4),
        writers={11: "a", 12: "b"},
    )  # fmt: skip


def _upload(device: str, values: torch.Tensor) -> torch.Tensor:
    return values if device == "cpu" else values.pin_memory().to(device, non_blocking=True)
