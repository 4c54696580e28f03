"""Mirror: what the canary itself wrote, on the host; every record in it is also in the device's two copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.state import CanaryState
from kvcanary_kernels.record import COLUMNS, MASK_32, SEAL
from kvcanary_kernels.seal import identity_words, seal_values

Words = NDArray[np.uint64]
Rows = NDArray[np.int64]


class Mirror:
    """Records by row (the slot, counted through all pools): on the host as integers, on the device as two copies.

    An engine's stray write can reach `state.records`, which is compared with `state.expected` whenever it is read.

    table:  [rows, 8] the records as written; content_b comes later, and a fresh record's seal is only what its pool
            adds to it. On a CPU this is the memory of `state.expected`
    judged: [rows] the entries that were found to be their requests' truth
    epoch:  counts up when one of them is written again, so that every row is judged anew
    """

    def __init__(self, state: CanaryState) -> None:
        self._state = state
        expected = state.expected
        self.table: Words = (expected if expected.is_cpu else expected.cpu()).numpy().view(np.uint64)
        self.judged: NDArray[np.bool_] = np.zeros(len(self.table), np.bool_)
        self.epoch = 0
        self._fresh: list[Rows] = []

    def write(self, rows: Rows, records: Words) -> None:
        """These records are new; the device has them from `flush` on. Of equal rows the last counts."""
        if not len(rows):
            return
        if self.judged[rows].any():
            self.epoch += 1
            self.judged[:] = False
        self.table[rows] = records
        if len(rows):
            self._fresh.append(rows)

    def flush(self) -> None:
        """Write what is new to the device."""
        if not self._fresh:
            return
        state, rows = self._state, np.concatenate(self._fresh)
        records = torch.from_numpy(self.table[rows].view(np.int64)).to(state.records.device)
        where = torch.from_numpy(rows).to(state.records.device)
        records[:, SEAL] += seal_values(identity_words(records), where, 0, state.keys)
        state.records.index_copy_(0, where, records)
        state.expected.index_copy_(0, where, records)
        self._fresh.clear()


def two_words(low: Any, high: Any) -> Any:
    """A record's column that holds two unsigned 32-bit words: plain integers, or arrays of uint64."""
    return low & MASK_32 | high << 32


def no_records(n: int) -> Words:
    """[n, 8] records to fill in."""
    return np.empty((n, COLUMNS), np.uint64)
