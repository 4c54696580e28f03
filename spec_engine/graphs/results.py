"""Results: what a captured program has found out, brought to the host in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from kvcanary_kernels.record.streams import current


class Results:
    """Named int64 tensors; a program puts them, the host fetches all of them after its run."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes = dict(shapes)
        total = sum(prod(shape) for shape in shapes.values())
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self._host = self._device
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._host = torch.zeros(total, dtype=torch.int64, pin_memory=True)
            self._arrived = torch.cuda.Event()

    def put(self, **tensors: Tensor) -> None:
        """Inside a program: what the host will fetch."""
        for name, where in self._split(self._device).items():
            where.copy_(tensors[name])

    def fetch(self) -> dict[str, Tensor]:
        """All of the last run's, in host memory: one copy, and the host waits for it. Gone with the next `fetch`."""
        if self._arrived is not None:
            self._host.copy_(self._device, non_blocking=True)
            self._arrived.record(current(self._device.device))
            self._arrived.synchronize()
        return self._split(self._host)

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
