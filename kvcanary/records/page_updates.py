"""PageUpdates: columns of a table on the device as the host knows them now, told by launches that are captured once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvcanary.records.graph_cache import Replays
from kvcanary.records.mailbox import to_device
from kvcanary_kernels.record.streams import current

LEAST_ROOM = 16
BUFFERS = 8  # of each size; where the device is behind by more, a delta goes by itself


class PageUpdates:
    """What is said of columns, in the order in which it is said and nobody waits."""

    def __init__(self, table: Tensor) -> None:
        """`table`: [rows, columns] int64"""
        self._table, self._replays = table, Replays(table.device)
        self._buffers: dict[int, deque[_Buffer]] = {}

    def send(self, count: int, fill: Callable[[int, int], None]) -> None:
        """So many columns, some at least, and which numbers the table's rows have there.

        fill: writes to an address [1 + rows, room] int64, the columns first; where there is more room than columns one
              of them comes again, with the same numbers
        """
        room = max(LEAST_ROOM, 1 << (count - 1).bit_length())
        buffer = self._take(room) if self._table.is_cuda else None
        if buffer is None:
            reported = torch.empty(1 + len(self._table), room, dtype=torch.int64)
            fill(reported.data_ptr(), room)
            self._put(to_device(reported, self._table.device))
            return
        fill(buffer.at, room)
        self._replays.run(buffer, buffer.launch)
        buffer.over.record(current(self._table.device))

    def _put(self, delta: Tensor) -> None:
        self._table.index_copy_(1, delta[0], delta[1:])

    def _take(self, room: int) -> _Buffer | None:
        """The one that was used longest ago; None where its copy may not be over."""
        if room not in self._buffers:
            self._buffers[room] = deque(_Buffer(self._table, self._put, room) for _ in range(BUFFERS))
        buffers = self._buffers[room]
        if not buffers[0].over.query():
            return None
        buffers.rotate(-1)
        return buffers[-1]


class _Buffer:
    """at: where the host writes [1 + rows, room] int64;  over: the end of the last copy of that"""

    def __init__(self, table: Tensor, put: Callable[[Tensor], None], room: int) -> None:
        with torch.inference_mode(False):
            self._reported = torch.zeros(1 + len(table), room, dtype=torch.int64, pin_memory=True)
            self._there = torch.zeros(1 + len(table), room, dtype=torch.int64, device=table.device)
        self.at, self.over, self._put = self._reported.data_ptr(), torch.cuda.Event(), put

    def launch(self) -> None:
        self._put(self._there.copy_(self._reported, non_blocking=True))
