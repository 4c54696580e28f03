"""Arena: all tensors of one forward in two pieces of memory, so that a forward that comes once launches few operations.

Zeros are one piece of device memory; numbers that the host knows are another, which one copy brings, and nobody waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.forward import room_on

ALIGNMENT = 16  # numbers: kernels are compiled for aligned addresses, and anew for others


class Arena:
    """A `Room`. What does not fit lies in memory of its own."""

    def __init__(self, device: torch.device, num_zeros: int, num_told: int) -> None:
        """`num_zeros`, `num_told`: numbers that there is room for."""
        is_cuda = device.type == "cuda"
        self._zeros = torch.zeros(num_zeros, dtype=torch.int64, device=device)
        self._told = torch.empty(num_told, dtype=torch.int64, device=device)
        self._host = torch.empty(num_told, dtype=torch.int64, pin_memory=is_cuda) if is_cuda else self._told
        self._numbers, self._num_zeros = self._host.numpy(), num_zeros
        self._next_zero = self._next_told = 0
        self._elsewhere = room_on(device)

    def __call__(self, wanted: Tensor | int) -> Tensor:
        """So many zeros, or these numbers of the host: [n] int64; numbers are there from `send` on."""
        size = wanted if isinstance(wanted, int) else wanted.numel()
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        if isinstance(wanted, int):
            first, self._next_zero = self._next_zero, self._next_zero + taken
            return self._elsewhere(wanted) if first + size > self._num_zeros else self._zeros.narrow(0, first, size)
        first, self._next_told = self._next_told, self._next_told + taken
        if first + size > len(self._numbers):
            return self._elsewhere(wanted)
        self._numbers[first : first + size] = wanted.numpy()
        return self._told.narrow(0, first, size)

    def send(self) -> None:
        """The numbers go to the device, behind what it was given before."""
        if self._host is not self._told:
            self._told.copy_(self._host, non_blocking=True)
