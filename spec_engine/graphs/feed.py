"""Feed: what the host tells a captured program before each run, all of it in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Feed:
    """Named sections of int64 at fixed addresses; zeros until `set` and `send`, and zeros behind what was set."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self._numbers = self._host.numpy()
        self._sections: dict[str, slice] = {}
        first = 0
        for name, size in sizes.items():
            self._sections[name] = slice(first, first + size)
            first += size

    def __getitem__(self, name: str) -> Tensor:
        """The section on the device."""
        return self._device[self._sections[name]]

    def set(self, **sections: Sequence[int]) -> None:
        """What the next `send` brings to the device; the last one's copy must be over."""
        for name, values in sections.items():
            where = self._sections[name]
            end = where.start + len(values)
            self._numbers[where.start : end] = values
            self._numbers[end : where.stop] = 0

    def send(self) -> None:
        """One copy, for which nobody waits."""
        self._device.copy_(self._host, non_blocking=True)
