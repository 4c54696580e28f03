"""A tensor of the device that the host writes to in turns."""

from __future__ import annotations

import torch


class StagedWriteTensor:
    def __init__(self, size, dtype) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
