"""The output of a step that is still on its way: no token leaves before the counter that came with it was looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hold_back(output: Any, count: Callable[[], int], look_at: Callable[[int], None]) -> None:
    """Let `output.get_output()` look at what `count()` waits for, before it gives tokens."""
    get_output = output.get_output

    def held() -> Any:
        result = get_output()
        look_at(count())
        return result

    output.get_output = held
