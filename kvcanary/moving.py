"""Moves: records follow the bytes that an engine has moved, and damage moves with them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.mirror import Mirror, Words
from kvcanary.sites import pack_site
from kvcanary.staging import Stage
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels.record import CONTENT_B, MASK_32, REQUEST_GENERATION, SEAL, STEP_SITE


class Mover:
    """Applies declared moves to records and fingerprints."""

    def __init__(self, state: CanaryState, mirror: Mirror, grants: NDArray[np.int64]) -> None:
        self._state, self._mirror, self._grants = state, mirror, grants

    def apply(self, pool: PoolState, stage: Stage, src: NDArray[np.int64], dst: NDArray[np.int64], step: int) -> None:
        """Every source was read before any destination was written; `src` and `dst` are slots, each distinct."""
        moves = src != dst
        sources, slots = src[moves], dst[moves]
        if not len(slots):
            return
        device = pool.records.device
        from_rows, to_rows = torch.from_numpy(sources).to(device), torch.from_numpy(slots).to(device)
        found, expected = pool.records.index_select(0, from_rows), pool.expected.index_select(0, from_rows)
        waits = stage.move(sources.tolist(), slots.tolist())
        content_a = None if waits else pool.content_a.index_select(1, from_rows)
        self._mirror.write(pool.base + slots, self._moved(pool, sources, slots, step))
        if content_a is not None:
            self._mirror.flush()
            self._move_fingerprints(pool, to_rows, content_a, expected)
        if not torch.equal(found, expected):
            self._mirror.flush()
            damage = found - expected  # a damaged source stays damaged
            pool.records.index_copy_(0, to_rows, pool.records.index_select(0, to_rows) + damage)

    def _moved(self, pool: PoolState, sources: NDArray[np.int64], slots: NDArray[np.int64], step: int) -> Words:
        """Token, position, chain and layers of the sources under the grants of the destinations' pages."""
        records = self._mirror.table[pool.base + sources]
        size, grants = self._state.page_size, self._grants.view(np.uint64)
        owners = records[:, REQUEST_GENERATION]
        stale = owners >> 32 != grants[sources // size]  # a move makes nothing current
        records[:, REQUEST_GENERATION] = owners & MASK_32 | np.where(stale, 0, grants[slots // size]) << 32
        records[:, STEP_SITE] = step & MASK_32 | pack_site("move", 0) << 32
        records[:, CONTENT_B] = 0
        records[:, SEAL] = pool.seal_term
        return records

    def _move_fingerprints(self, pool: PoolState, to_rows: Tensor, content_a: Tensor, expected: Tensor) -> None:
        pool.content_a.index_copy_(1, to_rows, content_a)
        content_b = expected.select(1, CONTENT_B)
        pool.records.select(1, CONTENT_B).index_copy_(0, to_rows, content_b)
        pool.expected.select(1, CONTENT_B).index_copy_(0, to_rows, content_b)
