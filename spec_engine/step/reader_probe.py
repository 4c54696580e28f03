"""The engine's own attention for the canary's reader probe: forwards as the runner opens them, over known entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_engine.attention.backends import BACKENDS
from spec_engine.core import ForwardBatch, indptr, within_window
from spec_engine.memory.pools.pool import KVPool

if TYPE_CHECKING:
    from kvcanary import ProbeForward


class ProbedReader:
    """`kvcanary.probe.reader.Attend`, by the backend that reads this pool; slots are the pool's own."""

    def __init__(self, pool: KVPool, num_heads: int, backend: str, window: int | None) -> None:
        self._open, self._pool, self._num_heads = BACKENDS[backend].load(), pool, num_heads
        self._window, self._device = window, pool.kv.device

    def __call__(self, forward: ProbeForward, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, values = self._batch(forward), [one.to(self._device) for one in (q, k, v)]
        if self._window is not None:
            batch = within_window(batch, self._window)
        attention = self._open(self._pool, batch, self._num_heads, batch.kv_indices, batch.slots, None)
        alone = self._open.alone(self._pool, batch, self._num_heads)
        if alone is None:
            return attention.attend(layer, *values)
        output = alone(layer, *values)
        attention.store(layer, *values[1:])
        return output

    def _batch(self, forward: ProbeForward) -> ForwardBatch:
        kv_lens, branches = tuple(map(len, forward.slots)), forward.branches
        prefixes = [length - new - forward.index for length, new in zip(kv_lens, forward.num_new, strict=True)]
        slots = self._ints(forward.written)
        mask = None if forward.mask is None else forward.mask.to(self._device).expand(len(kv_lens), -1, -1)
        return ForwardBatch(
            kind=forward.kind,
            index=forward.index,
            requests=tuple(f"probe {number}" for number in range(len(kv_lens) // branches)),
            rows_per_request=branches,
            prefix_lens=self._ints(prefixes[::branches]),
            kv_indptr=indptr(kv_lens, self._device),
            kv_indices=self._ints([slot for row in forward.slots for slot in row]),
            kv_lens=kv_lens,
            new_lens=forward.num_new,
            slots=slots,
            tokens=torch.zeros_like(slots),
            positions=self._ints(forward.positions()),
            tree_mask=mask,
            q_indptr=indptr(forward.num_new, self._device),
        )

    def _ints(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)
