"""The output of a step that is still on its way: no token leaves before the counter that came with it was looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def hold_back(output: Any, total: Tensor, look_at: Callable[[int], None]) -> None:
    """Let `output.get_output()` look at the counter `total` [1] as it is now on the device, before it gives tokens."""
    count = torch.empty(1, dtype=torch.int64, pin_memory=total.is_cuda)
    count.copy_(total, non_blocking=True)
    event = torch.cuda.Event() if total.is_cuda else None
    if event is not None:
        event.record()
    get_output = output.get_output

    def held() -> Any:
        result = get_output()
        if event is not None:
            event.synchronize()
        look_at(int(count))
        return result

    output.get_output = held
