"""Arena: all tensors of one forward in two pieces of memory, so that a forward that comes once launches few operations.

Zeros are one piece of device memory; numbers that the host knows are another, which one copy brings, and nobody waits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary_kernels.judge.forward import room_on

ALIGNMENT = 16  # numbers: kernels are compiled for aligned addresses, and anew for others


class Arena:
    """A `Room`. What does not fit lies in memory of its own."""

    def __init__(self, device: torch.device, num_zeros: int, num_inputs: int) -> None:
        """`num_zeros`, `num_inputs`: numbers that there is room for."""
        is_cuda = device.type == "cuda"
        self._zeros = torch.zeros(num_zeros, dtype=torch.int64, device=device)
        self._inputs = torch.zeros(num_inputs, dtype=torch.int64, device=device)
        self._host = torch.zeros(num_inputs, dtype=torch.int64, pin_memory=True) if is_cuda else self._inputs
        self._numbers, self._num_zeros = self._host.numpy(), num_zeros
        self._first_numbers = self._numbers.copy()
        self._next_zero = self._next_input = 0
        self._elsewhere = room_on(device)

    def __call__(self, wanted: Tensor | int) -> Tensor:
        """So many zeros, or these numbers of the host: [n] int64; numbers are there from `send` on."""
        if not isinstance(wanted, int):
            return self._take_input(wanted)
        first, self._next_zero = self._next_zero, self._next_zero + _aligned(wanted)
        return self._elsewhere(wanted) if first + wanted > self._num_zeros else self._zeros.narrow(0, first, wanted)

    def numbers(self, size: int) -> tuple[Tensor, NDArray[np.int64]]:
        """So many numbers of the host, [size] int64, and where it writes them before `send`; zeros until then."""
        first, self._next_input = self._next_input, self._next_input + _aligned(size)
        return self._inputs.narrow(0, first, size), self._numbers[first : first + size]

    def rewind(self) -> None:
        """Numbers of the host are those that were asked for, and zeros again where it writes them itself."""
        self._numbers[:] = self._first_numbers

    def send(self) -> None:
        """The numbers go to the device, behind what it was given before."""
        if self._host is not self._inputs:
            self._inputs.copy_(self._host, non_blocking=True)

    def _take_input(self, wanted: Tensor) -> Tensor:
        first, size = self._next_input, wanted.numel()
        if first + size > len(self._numbers):
            return self._elsewhere(wanted)
        there, here = self.numbers(size)
        here[:] = self._first_numbers[first : first + size] = wanted.numpy()
        return there


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
