"""Numbers of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TYPES = {torch.int64: np.int64, torch.float64: np.float64}


def to_device(
    numbers: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | NDArray[np.int64],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """A tensor of these numbers, int64 or float64.

    On CUDA the copy runs behind what the device was given before, and nobody waits.
    """
    host = torch.from_numpy(np.array(numbers, _TYPES[dtype]))  # of a long list, several times as fast as torch.tensor
    return host if device.type != "cuda" else host.pin_memory().to(device, non_blocking=True)
