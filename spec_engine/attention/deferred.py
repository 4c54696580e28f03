"""Attention that is opened when the device has something to compute: by the first layer that reads the pool."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from spec_engine.attention.base import Alone, PoolAttention


class DeferredAttention:
    """A `KVAccess`; what it takes to open is done while a device computes what stands before it.

    A first layer that sees its own tokens alone attends before that, and its K and V are stored when it is opened.
    """

    def __init__(self, opened: Callable[[], PoolAttention], alone: Alone | None = None) -> None:
        """``alone``: attends where the pool is not read; None: it is."""
        self._opened, self._alone = opened, alone
        self._attention: PoolAttention | None = None
        self._unstored: tuple[int, Tensor, Tensor] | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the attention of this forward."""
        if self._alone is not None:
            out, self._alone, self._unstored = self._alone(layer, q, k, v), None, (layer, k, v)
            return out
        return self._open().attend(layer, q, k, v)

    def finish(self) -> None:
        """The body has run: what it gave is in the pool."""
        if self._unstored is not None:
            self._open()

    def _open(self) -> PoolAttention:
        if self._attention is None:
            self._attention = self._opened()
            if self._unstored is not None:
                (layer, k, v), self._unstored = self._unstored, None
                self._attention.store(layer, k, v)
        return self._attention
