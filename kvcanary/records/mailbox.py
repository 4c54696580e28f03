"""Mailbox: what the device tells the host behind a step, copied into host memory that nothing else writes meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary_kernels.judge.post import parts_of

MAX_IN_FLIGHT = 4  # steps that the host may not have collected: buffers of every mailbox
NUM_MESSAGES = MAX_IN_FLIGHT + 1  # of a body that runs step by step: those, and the one that it writes


class Mailbox:
    """Numbers at one address of the device, and pinned buffers into which they go in turn.

    device: what is sent
    """

    def __init__(self, device: Tensor) -> None:
        self.device = device
        with torch.inference_mode(False):
            buffers = [
                torch.zeros(device.shape, dtype=device.dtype, pin_memory=device.is_cuda) for _ in range(MAX_IN_FLIGHT)
            ]
        self._buffers = deque((buffer, buffer.numpy()) for buffer in buffers)

    def send(self) -> NDArray[Any]:
        """One copy, for which nobody waits yet; there until as many follow as there are buffers."""
        buffer, numbers = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.copy_(self.device, non_blocking=True)
        return numbers


class Message:
    """Tensors as they were packed in one turn, flat: there when the run is over, for MAX_IN_FLIGHT turns.

    numbers: all of them, one behind the other;  at: their address;  where: of each
    """

    __slots__ = ("at", "numbers", "where")

    def __init__(self, numbers: NDArray[np.int64], where: Sequence[slice]) -> None:
        self.numbers, self.where, self.at = numbers, where, numbers.ctypes.data

    def __getitem__(self, part: int) -> NDArray[np.int64]:
        return self.numbers[self.where[part]]

    def parts(self) -> list[NDArray[np.int64]]:
        return [self.numbers[where] for where in self.where]


class Packed:
    """Several int64 tensors that go together within a captured body, into memory of the host: no copy behind its run.

    step: [1] int64 (`kernel_launches.Shared`), whose turn says where they go;  post: the operation
    """

    def __init__(
        self, tensors: Sequence[Tensor], step: Tensor, post: Callable[..., None], num_messages: int = NUM_MESSAGES
    ) -> None:
        """`num_messages`: turns that may be read; one for a body that runs once."""
        self._step, self._post = step, post
        ends = list(accumulate((tensor.numel() for tensor in tensors), initial=0))
        where = list(map(slice, ends, ends[1:]))
        with torch.inference_mode(False):
            self._parts = parts_of([*(tensor.view(-1) for tensor in tensors), step])
            self._box = torch.zeros(num_messages, self._parts.numel, dtype=torch.int64, pin_memory=step.is_cuda)
        self._messages = [Message(numbers, where) for numbers in self._box.numpy()]

    def pack(self) -> None:
        """Within the body, at fixed addresses."""
        self._post(self._parts, self._step, box=self._box)

    def message_of(self, turn: int) -> Message:
        """What is packed when the body runs in this turn."""
        return self._messages[turn % len(self._messages)]

    def has_run(self, turn: int) -> bool:
        """Whether the body ran in that turn, as long as its line is there; else a run before has left it."""
        return self.message_of(turn).numbers.item(-1) >> 32 == turn


class PackedMask:
    """A mask that goes along in a `Packed`, as words of eight.

    device: the mask, bool;  words: [n] int64, as of the last `pack`: the mask's own memory, where it fills them
    """

    def __init__(self, mask: Tensor) -> None:
        self.device, self._count = mask, mask.numel()
        self._is_whole = self._count % 8 == 0 and mask.is_contiguous() and mask.data_ptr() % 8 == 0
        with torch.inference_mode(False):
            if self._is_whole:
                self.words = mask.view(-1).view(torch.int64)
            else:
                self.words = torch.zeros(-(-self._count // 8), dtype=torch.int64, device=mask.device)

    def pack(self) -> None:
        """Within the body, before what it goes along in."""
        if not self._is_whole:
            self.words.view(torch.bool)[: self._count].copy_(self.device.view(-1))

    def read(self, words: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The mask of these words."""
        return words.view(np.bool_)[: self._count].reshape(self.device.shape)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device; nobody waits for the copy, and the memory that it reads is kept until then."""
    if device.type == "cpu":
        return host
    pinned = torch.empty_like(host, pin_memory=True)
    pinned.numpy()[...] = host.numpy()  # `copy_` would wake all of torch's threads for a large one
    return pinned.to(device, non_blocking=True)
