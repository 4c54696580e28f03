"""The sum that names a block: of its entries' fingerprints, each times a power of an odd number by its place.

Entries in another order have another sum, and a word that changed has changed in one place alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcanary_kernels.record.layout import MASK_64, signed

_FACTOR = 0x9E3779B97F4A7C15


def weights_of(size: int, device: torch.device | str = "cpu") -> Tensor:
    """[size] int64, all odd."""
    return torch.tensor([signed(pow(_FACTOR, place, 1 << 64)) for place in range(size)], device=device)


def undone(difference: int, place: int) -> int:
    """What an entry at this place of a block must change by so that the block's sum changes by `difference`."""
    return signed(difference * pow(_FACTOR, -place, 1 << 64) & MASK_64)
