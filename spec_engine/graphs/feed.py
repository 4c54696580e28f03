"""Feed: what the host tells a captured program before each run, all of it in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvcanary.invariants import check_staging_room
from kvcanary_kernels.record.streams import current

TURNS = 3  # host buffers: of the step that runs, of the one behind it, and of the one that is being prepared


class Feed:
    """Named sections of int64 at fixed addresses; zeros until `set` and `send`, and zeros behind what was set.

    addresses: by turn, of what a `send` brings to the device;  turn: of the next one
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        total, is_cuda = sum(sizes.values()), device.type == "cuda"
        self._buffers = [torch.zeros(total, dtype=torch.int64, pin_memory=is_cuda) for _ in range(TURNS)]
        self._copies = [torch.cuda.Event() for _ in range(TURNS)] if is_cuda else []
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self.addresses, self.turn = [buffer.data_ptr() for buffer in self._buffers], 0
        self._numbers = self._buffers[0].numpy()
        self._sections: dict[str, slice] = {}
        first = 0
        for name, size in sizes.items():
            self._sections[name] = slice(first, first + size)
            first += size

    def __getitem__(self, name: str) -> Tensor:
        """The section on the device."""
        return self._device[self._sections[name]]

    def set(self, **sections: Sequence[int]) -> None:
        """What the next `send` brings to the device; StagingError for more than a section holds."""
        for name, values in sections.items():
            where = self._sections[name]
            end = where.start + len(values)
            check_staging_room(name, len(values), where.stop - where.start)
            self._numbers[where.start : end] = values
            self._numbers[end : where.stop] = 0

    def offset(self, name: str) -> int:
        """Of a section, in bytes behind an address; sections lie one behind the other."""
        return 8 * int(self._sections[name].start)

    def send(self) -> None:
        """One copy, for which nobody waits; what is set from now on lies elsewhere."""
        sent = self.turn
        self._device.copy_(self._buffers[sent], non_blocking=True)
        self.turn = (sent + 1) % TURNS
        if self._copies:
            self._copies[sent].record(current(self._device.device))
            self._copies[self.turn].synchronize()  # of the send before the last, or none yet
        numbers = self._buffers[self.turn].numpy()
        numbers[:] = self._numbers
        self._numbers = numbers
