"""The least that hooks can do: behind guards, write which step it is, launch two graphs, look at a counter.

What is judged means nothing then, and nobody looks at it. It is the time below which hooks of this kind cannot be, on
one machine and in one run with those that judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.vllm.runner_v2 import HandleV2

FIRST_STEPS = 20  # that a canary judges as always, at least; what the next decode step launches is launched again


@contextmanager
def floored() -> Iterator[None]:
    """Hooks of runner V2 that are attached meanwhile do the least, from the first steps of their canary on."""
    prepare, execute, look = HandleV2._prepare_attn, HandleV2._execute_model, HandleV2._look_at
    floors = WeakSet[HandleV2]()

    def is_over(canary: PagedCanary) -> bool:
        """Behind a step of one token a row: a step of 2,048 tokens takes the device longer than most."""
        return canary.step >= FIRST_STEPS and canary._can_repeat

    def prepare_attn(self: HandleV2, method: Any, batch: Any) -> Any:
        canary = self.canary
        if self not in floors and canary is not None and self.is_armed and is_over(canary):
            floors.add(self)
        if self not in floors or canary is None:
            return prepare(self, method, batch)
        result = method(batch)
        canary.step += 1
        canary.launches.again(canary.step)
        self._is_running = True
        return result

    def execute_model(self: HandleV2, method: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        canary = self.canary
        if self not in floors or canary is None:
            return execute(self, method, output, *args, **kwargs)
        self._begin()
        result = method(output, *args, **kwargs)
        if self._is_running:
            canary.launches.after(canary._most_stored)
        return result

    def look_at(self: HandleV2, total: int, step: int) -> None:
        if self not in floors:
            look(self, total, step)

    with (
        patch.object(HandleV2, "_prepare_attn", prepare_attn),
        patch.object(HandleV2, "_execute_model", execute_model),
        patch.object(HandleV2, "_look_at", look_at),
    ):
        yield
