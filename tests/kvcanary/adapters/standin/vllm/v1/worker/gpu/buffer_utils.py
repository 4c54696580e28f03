"""A tensor of the device that the host writes to in turns."""

from __future__ import annotations

import torch


class StagedWriteTensor:
    def __init__(self, size, dtype) -> None:
        self.gpu, self._staged = torch.zeros(size, dtype=dtype), list[tuple[int, int]]()

    def stage_write_elem(self, index: int, x: int) -> None:
        self._staged.append((index, x))

    def apply_write(self) -> None:
        for index, x in self._staged:
            self.gpu[index] = x
        self._staged.clear()
