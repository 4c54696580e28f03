"""Outbox: what the device tells the host behind a step, copied into host memory that nothing else writes meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

IN_THE_AIR = 4  # steps of which the host may not have heard: buffers of every outbox


class Outbox:
    """Numbers at one address of the device, and pinned buffers into which they go in turn.

    device: what is sent
    """

    def __init__(self, device: Tensor) -> None:
        self.device = device
        with torch.inference_mode(False):
            self._buffers = deque(
                torch.zeros(device.shape, dtype=device.dtype, pin_memory=device.is_cuda) for _ in range(IN_THE_AIR)
            )

    def send(self, count: int | None = None) -> Tensor:
        """One copy of the first ``count`` (None: of all), for which nobody waits yet; there until as many follow."""
        buffer = self._buffers[0][:count]
        self._buffers.rotate(-1)
        buffer.copy_(self.device[:count], non_blocking=True)
        return buffer


class Packed:
    """Several int64 tensors that go together: `pack` within a captured body, `send` behind its run."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._shapes = [tensor.shape for tensor in self._tensors]
        self._flat = [tensor.view(-1) for tensor in self._tensors]
        self._sizes = [tensor.numel() for tensor in self._tensors]
        with torch.inference_mode(False):
            self._outbox = Outbox(self._tensors[0].new_zeros(sum(self._sizes)))

    def pack(self) -> None:
        """One launch, at fixed addresses."""
        torch.cat(self._flat, out=self._outbox.device)

    def send(self) -> list[Tensor]:
        """The tensors as they were packed, in host memory once the copy is over."""
        parts = self._outbox.send().split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device; nobody waits for the copy, and the memory that it reads is kept until then."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
