"""Feed: what the host tells a captured program before each run, all of it in one copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NUM_BUFFERS = 3  # lag + 2: the step that is prepared, the one that runs, and the one of which the host hears


class Feed:
    """Named sections of int64 at fixed addresses; zeros until `set` and `send`, and zeros behind what was set.

    Every run needs all sections set; the host's buffers take turns, so that the next run is prepared while one waits.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        self._is_cuda = device.type == "cuda"
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self._buffers = deque(_Buffer(total, self._is_cuda) for _ in range(NUM_BUFFERS if self._is_cuda else 1))
        self._sections: dict[str, slice] = {}
        first = 0
        for name, size in sizes.items():
            self._sections[name] = slice(first, first + size)
            first += size

    def __getitem__(self, name: str) -> Tensor:
        """The section on the device."""
        return self._device[self._sections[name]]

    def set(self, **sections: Sequence[int]) -> None:
        """What the next `send` brings to the device."""
        numbers = self._buffers[0].numbers
        for name, values in sections.items():
            where = self._sections[name]
            end = where.start + len(values)
            numbers[where.start : end] = values
            numbers[end : where.stop] = 0

    def send(self) -> None:
        """One copy, for which nobody waits but who fills its buffer again."""
        buffer = self._buffers[0]
        self._device.copy_(buffer.host, non_blocking=True)
        if self._is_cuda:
            buffer.sent.record()
            self._buffers.rotate(-1)
            self._buffers[0].sent.synchronize()


class _Buffer:
    """Numbers in host memory; sent: the end of their last copy."""

    def __init__(self, total: int, is_cuda: bool) -> None:
        self.host = torch.zeros(total, dtype=torch.int64, pin_memory=is_cuda)
        self.numbers = self.host.numpy()
        if is_cuda:
            self.sent = torch.cuda.Event()
