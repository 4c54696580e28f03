"""The engine's own attention for the canary's reader probe: forwards as the runner opens them, over known entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_engine.core import ForwardBatch, indptr, within_window
from spec_engine.memory.pools.pool import KVPool
from spec_engine.step.hooks import Forwards

if TYPE_CHECKING:
    from kvcanary import ProbeForward


class ProbedReader:
    """`kvcanary.probe.reader.Attend`, by the backend that reads this pool; slots are the pool's own."""

    def __init__(self, pool: KVPool, num_heads: int, backend: str, window: int | None) -> None:
        self._forwards, self._window = Forwards(pool, num_heads, None, backend), window
        self._device = pool.kv.device

    def __call__(self, forward: ProbeForward, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch = self._batch(forward)
        with self._forwards.open(batch if self._window is None else within_window(batch, self._window)) as kv:
            return kv.attend(layer, *(one.to(self._device) for one in (q, k, v)))

    def _batch(self, forward: ProbeForward) -> ForwardBatch:
        kv_lens = tuple(map(len, forward.slots))
        prefixes = [length - new for length, new in zip(kv_lens, forward.num_new, strict=True)]
        slots = self._ints(forward.written)
        mask = None if forward.mask is None else forward.mask.to(self._device).expand(len(kv_lens), -1, -1)
        return ForwardBatch(
            kind=forward.kind,
            index=0,
            requests=tuple(f"probe {row}" for row in range(len(kv_lens))),
            rows_per_request=1,
            prefix_lens=self._ints(prefixes),
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
