"""Mirror: what the canary itself wrote, on the host; every record in it is also in the device's two copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.forward import Forward
from kvcanary.host import NULL_WRITTEN, REWRITTEN
from kvcanary.sites import pack_site
from kvcanary.state import CanaryState
from kvcanary_kernels.record import CHAIN, COLUMNS, MASK_32, bitmap_columns, signed

Words = NDArray[np.uint64]
Rows = NDArray[np.int64]


class Mirror:
    """Records by row (the slot, counted through all pools): on the host as integers, on the device as two copies.

    An engine's stray write can reach `state.records`, which is compared with `state.expected` whenever it is read.

    table:  [rows, 8] the records as written; content_b comes later. On a CPU this is the memory of `state.expected`
    memory: the same with signs
    judged: [rows] the entries that were found to be their requests' truth
    epoch:  counts up when one of them is written again, so that every row is judged anew
    """

    def __init__(self, state: CanaryState) -> None:
        self._state = state
        self._is_host = state.expected.is_cpu
        self.memory: Rows = state.expected.cpu().numpy()
        self.table: Words = self.memory.view(np.uint64)
        self.judged: NDArray[np.bool_] = np.zeros(len(self.memory), np.bool_)
        self.epoch = 0
        live = state.records.numpy() if self._is_host else self.memory
        self._memory = state.keys.constants.cpu().numpy(), self.memory, live, self.judged
        self._loops = state.pools[0].loops
        self._fresh: list[Rows] = []

    def write(self, rows: Rows, records: Words) -> None:
        """These records are new, with what their pool adds in the place of the seal. Of equal rows the last counts.

        A device has them from `flush` on.
        """
        self._note(rows, self._loops.write_records(rows, records.view(np.int64), *self._memory))

    def seal(self, forward: Forward, roots: Words, generations: Rows, page_size: int) -> int:
        """A record for all that a forward has written; what `loops.seal_plan` gives."""
        pool, names, ids = forward.pool, forward.slot_names, forward.host_ids
        seen = self._loops.seal_plan(
            forward.plan,
            forward.num_entries,
            forward.num_rows,
            forward.width,
            forward.has_parents,
            names,
            ids.data_ptr(),
            ids.shape[0],
            forward.uids,
            roots.view(np.int64),
            generations,
            page_size,
            two_words(forward.step, pack_site(*forward.site)),
            *map(signed, bitmap_columns(forward.stored)),
            pool.base,
            pool.view.num_slots,
            pool.view.null_slots,
            signed(pool.seal_term),
            *self._memory,
        )
        live = forward.planned.slots
        if seen & NULL_WRITTEN:
            live = live[live >= pool.view.null_slots]
        self._note(live + pool.base, seen & REWRITTEN)
        return seen

    def forget_null_chains(self, forward: Forward) -> None:
        """Null slots have no records: their chains were for what follows in the same step."""
        slots = forward.planned.slots
        self.table[slots[slots < forward.pool.view.null_slots] + forward.pool.base, CHAIN] = 0

    def flush(self) -> None:
        """Write what is new to the device."""
        if not self._fresh:
            return
        state, rows = self._state, np.concatenate(self._fresh)
        records = torch.from_numpy(self.table[rows].view(np.int64)).to(state.records.device)
        where = torch.from_numpy(rows).to(state.records.device)
        state.records.index_copy_(0, where, records)
        state.expected.index_copy_(0, where, records)
        self._fresh.clear()

    def _note(self, rows: Rows, rewritten: int) -> None:
        if rewritten:
            self.epoch += 1
            self.judged[:] = False
        if not self._is_host and len(rows):
            self._fresh.append(rows)


def two_words(low: Any, high: Any) -> Any:
    """A record's column that holds two unsigned 32-bit words: plain integers, or arrays of uint64."""
    return low & MASK_32 | high << 32


def no_records(n: int) -> Words:
    """[n, 8] records to fill in."""
    return np.empty((n, COLUMNS), np.uint64)
