"""Numbers of the host on their way to the device: from pinned memory, so that nobody waits for a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
ALIGNMENT = 16  # numbers: kernels are compiled for aligned addresses, and anew for others
_TYPES = {torch.int64: np.int64, torch.float64: np.float64}


def to_device(
    numbers: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Ints,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """A tensor of these numbers, int64 or float64.

    On CUDA the copy runs behind what the device was given before, and nobody waits.
    """
    host = torch.from_numpy(np.array(numbers, _TYPES[dtype]))  # of a long list, several times as fast as torch.tensor
    return host if device.type != "cuda" else host.pin_memory().to(device, non_blocking=True)


def together(parts: Sequence[Sequence[int] | Ints], device: torch.device) -> list[Tensor]:
    """Tensors of these lists of whole numbers, [n] int64 each, by one copy."""
    firsts = [0]
    for part in parts:
        firsts.append(firsts[-1] + -(-len(part) // ALIGNMENT) * ALIGNMENT)
    packed = np.empty(firsts[-1], np.int64)
    for part, first in zip(parts, firsts, strict=False):
        packed[first : first + len(part)] = part
    there = to_device(packed, device)
    return [there.narrow(0, first, len(part)) for part, first in zip(parts, firsts, strict=False)]
