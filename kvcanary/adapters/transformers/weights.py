"""Weights of a model that is attached to: whether they are those that wrote a cache."""

from __future__ import annotations

from typing import Any

import torch


class Weights:
    """Tells one state of a model's parameters from the next, as far as that costs nothing: torch counts what is written
    in place, and a few of their elements are read. Whoever writes past that (`.data`, other elements) says so.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._told = model, 0
        self._last: tuple[Any, ...] = ()
        self._number = 0

    def changed(self) -> None:
        """Somebody says that they are others now."""
        self._told += 1

    @torch.no_grad()
    def number(self, looks: bool) -> int:
        """Counts up with every change that was seen. `looks`: at elements, too, where host memory has them."""
        parameters = list(self._model.parameters())
        counts = tuple([(id(one), one._version) for one in parameters])
        seen = self._last[2] if self._last else ()
        if looks:
            seen = tuple([_few_of(one) for one in parameters if one.device.type == "cpu" and one.numel()])
        state = self._told, counts, seen
        if self._last and not _is_same(self._last, state):
            self._number += 1
        self._last = state
        return self._number


def _few_of(parameter: torch.Tensor) -> bytes:
    """Some elements, as they lie."""
    few = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // 3)][:4].contiguous()
    return few.view(torch.uint8).numpy().tobytes()


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Where elements were looked at once alone, they say nothing."""
    return one[:2] == other[:2] and (one[2] == other[2] or not one[2] or not other[2])
