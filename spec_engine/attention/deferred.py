"""Attention that is opened by the first layer that attends."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from spec_engine.models.decoder import KVAccess


class DeferredAttention:
    """A `KVAccess`; what it takes to open is done while a device computes what stands before the first attention."""

    def __init__(self, opened: Callable[[], KVAccess]) -> None:
        self._opened = opened
        self._attention: KVAccess | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the attention of this forward."""
        if self._attention is None:
            self._attention = self._opened()
        return self._attention.attend(layer, q, k, v)
