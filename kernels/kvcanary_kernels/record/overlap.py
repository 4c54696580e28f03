"""Kernels that are launched before the one they wait for has ended (programmatic dependent launch), where a GPU can.

Such a kernel waits, `device.follow`, before it reads anything that may have just been written, and before it writes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def overlaps(device: torch.device) -> bool:
    """A kernel may be launched before the one it waits for has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """Of a launch: whether the kernel waits by itself, and then that it is launched early."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps(device) else {"OVERLAPS": False}
