"""Deltas: columns of a table on the device as the host knows them now, told by launches that are captured once."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.captures import Replays
from kvcanary.outbox import to_device
from kvcanary_kernels.streams import current

LEAST_ROOM = 16
BUFFERS = 8  # of each size; where the device is behind by more, a delta goes by itself

Integers = NDArray[np.integer[Any]]


class Deltas:
    """What is said of columns, in the order in which it is said and nobody waits."""

    def __init__(self, table: Tensor) -> None:
        """`table`: [rows, columns] int64"""
        self._table, self._replays = table, Replays(table.device)
        self._buffers: dict[int, deque[_Buffer]] = {}

    def send(self, columns: Integers, *rows: Integers) -> None:
        """In these columns [n] the table's rows have these numbers [n] each; one that comes twice has them twice."""
        count = len(columns)
        if not count:
            return
        buffer = self._take(max(LEAST_ROOM, 1 << (count - 1).bit_length())) if self._table.is_cuda else None
        if buffer is None:
            self._put(to_device(torch.from_numpy(np.stack((columns, *rows))), self._table.device))
            return
        for number, own in enumerate((columns, *rows)):
            line = buffer.numbers[number]
            line[:count], line[count:] = own, own[0]
        self._replays.run(buffer, lambda: self._put(buffer.there.copy_(buffer.told, non_blocking=True)))
        buffer.over.record(current(self._table.device))

    def _put(self, delta: Tensor) -> None:
        self._table.index_copy_(1, delta[0], delta[1:])

    def _take(self, room: int) -> _Buffer | None:
        """The one that was used longest ago; None where its copy may not be over."""
        if room not in self._buffers:
            self._buffers[room] = deque(_Buffer(1 + len(self._table), room, self._table.device) for _ in range(BUFFERS))
        buffers = self._buffers[room]
        if not buffers[0].over.query():
            return None
        buffers.rotate(-1)
        return buffers[-1]


class _Buffer:
    """told, there: [rows, room] int64 of the host's and on the device;  over: the end of its last copy"""

    def __init__(self, rows: int, room: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.told = torch.zeros(rows, room, dtype=torch.int64, pin_memory=True)
            self.there = torch.zeros(rows, room, dtype=torch.int64, device=device)
        self.numbers, self.over = self.told.numpy(), torch.cuda.Event()
