"""Buffers that lie on the host and on the device."""

from __future__ import annotations

import torch


class CpuGpuBuffer:
    def __init__(self, *size, dtype) -> None:
        self.gpu = torch.zeros(size, dtype=dtype)
