"""Host rows: K and V of tokens in host memory, all layers of a token together, so that a run of them is one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spec_engine.memory.pool import KVPool


class HostRows:
    """``rows [num_rows, layers, 2, kv_heads, head_dim]`` beside one pool; pinned where the pool is on a GPU.

    ``save`` and ``load`` are operations of a stream: they enqueue copies there, and the host waits for nothing.
    """

    def __init__(self, pool: KVPool, num_rows: int) -> None:
        self._pool = pool
        layers, _, *shape = pool.kv.shape
        self.rows = torch.zeros(num_rows, layers, *shape, dtype=pool.kv.dtype, pin_memory=pool.kv.is_cuda)

    def save(self, slots: Tensor, places: Tensor) -> None:
        """Copy the pool's ``slots [n]`` to rows ``places [n]``, int64; places lie on the host."""
        rows = self._pool.kv[:, slots.to(self._pool.kv.device)].transpose(0, 1).contiguous()
        for place, first, end in _runs(places):
            self.rows[place : place + end - first].copy_(rows[first:end], non_blocking=True)

    def load(self, places: Tensor, slots: Tensor) -> None:
        """Copy rows ``places [n]`` to the pool's ``slots [n]``, int64; places lie on the host."""
        kv = self._pool.kv
        rows = torch.empty(len(places), *self.rows.shape[1:], dtype=kv.dtype, device=kv.device)
        for place, first, end in _runs(places):
            rows[first:end].copy_(self.rows[place : place + end - first], non_blocking=True)
        kv[:, slots.to(kv.device)] = rows.transpose(0, 1)


def slots_of(pages: Sequence[int], page_size: int) -> Tensor:
    """``[len(pages) * page_size] int64``: the slots of these pages, in order."""
    return (torch.tensor(list(pages), dtype=torch.int64)[:, None] * page_size + torch.arange(page_size)).flatten()


def _runs(places: Tensor) -> Iterator[tuple[int, int, int]]:
    """(place, first, end): entries [first, end) are consecutive places from ``place`` on."""
    ends = [*((places[1:] - places[:-1] != 1).nonzero().flatten() + 1).tolist(), len(places)]
    first = 0
    for end in ends:
        if end > first:
            yield int(places[first]), first, end
        first = end
