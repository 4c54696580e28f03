"""Host rows: K and V of tokens in host memory, all layers of a token together, so that a run of them is one copy.

What a pool keeps beside K and V, such as scales, travels with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spec_engine.memory.pools.pool import KVPool


class HostRows:
    """``parts``, each ``[num_rows, layers, ...]``, beside those of one pool; pinned where the pool is on a GPU.

    ``save`` and ``load`` are operations of a stream: they enqueue copies there, and the host waits for nothing.
    """

    def __init__(self, pool: KVPool, num_rows: int) -> None:
        self._pool = pool
        self.parts = tuple(_host_part(part, num_rows) for part in pool.parts)

    def save(self, slots: Tensor, places: Tensor) -> None:
        """Copy the pool's ``slots [n]`` to rows ``places [n]``, int64; places lie on the host."""
        own = slots.to(self._pool.kv.device)
        for host, part in zip(self.parts, self._pool.parts, strict=True):
            rows = part[:, own].transpose(0, 1).contiguous()
            for place, first, end in _runs(places):
                host[place : place + end - first].copy_(rows[first:end], non_blocking=True)

    def load(self, places: Tensor, slots: Tensor) -> None:
        """Copy rows ``places [n]`` to the pool's ``slots [n]``, int64; places lie on the host."""
        own = slots.to(self._pool.kv.device)
        for host, part in zip(self.parts, self._pool.parts, strict=True):
            rows = torch.empty(len(places), *host.shape[1:], dtype=part.dtype, device=part.device)
            for place, first, end in _runs(places):
                rows[first:end].copy_(host[place : place + end - first], non_blocking=True)
            part[:, own] = rows.transpose(0, 1)

    def lie_in(self, places: Tensor, slots: Tensor) -> bool:
        """Whether the pool's ``slots [n]`` hold rows ``places [n]`` bit for bit; the host waits for the device."""
        own = slots.to(self._pool.kv.device)
        return all(
            torch.equal(_bytes(part[:, own].transpose(0, 1).cpu()), _bytes(host[places]))
            for host, part in zip(self.parts, self._pool.parts, strict=True)
        )


def slots_of(pages: Sequence[int], page_size: int) -> Tensor:
    """``[len(pages) * page_size] int64``: the slots of these pages, in order."""
    return (torch.tensor(list(pages), dtype=torch.int64)[:, None] * page_size + torch.arange(page_size)).flatten()


def _host_part(part: Tensor, num_rows: int) -> Tensor:
    layers, _, *shape = part.shape
    return torch.zeros(num_rows, layers, *shape, dtype=part.dtype, pin_memory=part.is_cuda)


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _runs(places: Tensor) -> Iterator[tuple[int, int, int]]:
    """(place, first, end): entries [first, end) are consecutive places from ``place`` on."""
    ends = [*((places[1:] - places[:-1] != 1).nonzero().flatten() + 1).tolist(), len(places)]
    first = 0
    for end in ends:
        if end > first:
            yield int(places[first]), first, end
        first = end
