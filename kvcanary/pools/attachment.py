"""Attachment: one pool has one canary."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from kvcanary.errors import HookOrderError
from kvcanary.pools.views import PoolView

_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()


class Attachment:
    """The claim of one manager on the memory of its pools, until `release` or its end."""

    def __init__(self, pools: Sequence[PoolView]) -> None:
        """HookOrderError where a canary is attached to one of these pools already, or a graph is being captured."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise HookOrderError("a canary allocates when it is attached: attach it before a CUDA graph is captured")
        self.claim(pools)

    def claim(self, pools: Sequence[PoolView]) -> None:
        """The memory in which these lie now, and no other. HookOrderError as above."""
        tensors = [(view.name, tensor) for view in pools for part in view.parts for tensor in part.tensors]
        self._storages = {
            tensor.untyped_storage().data_ptr(): name for name, tensor in tensors if tensor.device.type != "meta"
        }
        _attached.discard(self)
        for other in _attached:
            for storage in self._storages.keys() & other._storages.keys():
                raise HookOrderError(
                    f"pool {self._storages[storage]!r} has a canary already, attached as {other._storages[storage]!r}: "
                    "detach() it first, or use that one"
                )
        _attached.add(self)

    def release(self) -> None:
        _attached.discard(self)
