"""Outbox: what the device tells the host behind a step, copied into host memory that nothing else writes meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IN_THE_AIR = 4  # steps of which the host may not have heard: buffers of every outbox


class Outbox:
    """Numbers at one address of the device, and pinned buffers into which they go in turn.

    device: what is sent
    """

    def __init__(self, device: Tensor, turns: int = IN_THE_AIR) -> None:
        """`turns`: buffers, as many as are sent before the first of them is read."""
        self.device = device
        with torch.inference_mode(False):
            buffers = [torch.zeros(device.shape, dtype=device.dtype, pin_memory=device.is_cuda) for _ in range(turns)]
        self._buffers = deque((buffer, buffer.numpy()) for buffer in buffers)

    def send(self) -> NDArray[Any]:
        """One copy, for which nobody waits yet; there until as many follow as there are buffers."""
        buffer, numbers = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.copy_(self.device, non_blocking=True)
        return numbers


class Packed:
    """Several int64 tensors that go together: `pack` within a captured body, `send` behind its run."""

    def __init__(self, tensors: Sequence[Tensor], turns: int = IN_THE_AIR) -> None:
        """`turns`: as of `Outbox`."""
        self._flat = [tensor.view(-1) for tensor in tensors]
        ends = list(accumulate((tensor.numel() for tensor in tensors), initial=0))
        self._where = list(map(slice, ends, ends[1:]))
        with torch.inference_mode(False):
            self._outbox = Outbox(tensors[0].new_zeros(ends[-1]), turns)

    def pack(self) -> None:
        """One launch, at fixed addresses."""
        torch.cat(self._flat, out=self._outbox.device)

    def send(self) -> list[NDArray[np.int64]]:
        """The tensors as they were packed, flat, in host memory once the copy is over."""
        numbers = self._outbox.send()
        return [numbers[where] for where in self._where]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device; nobody waits for the copy, and the memory that it reads is kept until then."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
