"""The output of a step that is still on its way: no token leaves before the counter that came with it was looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hold_back(output: Any, look: Callable[[Any], object]) -> None:
    """Let `output.get_output()` call `look(result)`, which waits for the counter, before it gives the result."""
    get_output = output.get_output

    def held() -> Any:
        result = get_output()
        look(result)
        return result

    output.get_output = held
