"""RecordStore: what the canary itself wrote, on the host; every record in it is also in the device's two copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.native.layout import BLANK, MOVED_BITS, REWRITTEN
from kvcanary.pools.launch_site import pack_site
from kvcanary.records.mailbox import to_device
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.record.layout import COLUMNS, CONTENT_B, MASK_32, REQUEST_GENERATION, SEAL, STEP_SITE

Words = NDArray[np.uint64]
Rows = NDArray[np.int64]

NOT_ALL = -1  # entries are such that move
_MOVED = pack_site("move", 0)


@dataclass(frozen=True, eq=False)
class Move:
    """Entries that were moved, all [n] int64: where they lay and lie, and what plans call these slots."""

    src: Rows
    dst: Rows
    src_names: Rows
    dst_names: Rows

    def of_entries(self, origin: PoolState, pool: PoolState) -> Move:
        """Without null slots: what a slot map sends nowhere has no record."""
        return self.at((self.src >= origin.view.null_slots) & (self.dst >= pool.view.null_slots))

    def at(self, kept: NDArray[np.bool_]) -> Move:
        """These entries alone."""
        if kept.all():
            return self
        return Move(self.src[kept], self.dst[kept], self.src_names[kept], self.dst_names[kept])


class RecordStore:
    """Records by row (the slot, counted through all pools): on the host as integers, on the device as two copies.

    An engine's stray write can reach `state.records`, which is compared with `state.expected` whenever it is read.

    table:  [rows, 8] the records as written; content_b comes later. On a CPU this is the memory of `state.expected`, on
            a GPU records that captured forwards have sealed are read when somebody looks
    memory: the same with signs
    judged: [rows] the entries that were found to be their requests' truth
    native_memory: the keys of seals and chains, `memory`, what an engine can reach of it, and `judged`
    epoch:  counts up when one of them is written again, so that every row is judged anew
    fresh:  rows that a device has from `flush` on
    """

    def __init__(self, state: CanaryState) -> None:
        self._state = state
        self._is_host = state.expected.is_cpu
        self._memory: Rows = state.expected.cpu().numpy()
        self.judged: NDArray[np.bool_] = np.zeros(len(self._memory), np.bool_)
        self.epoch = 0
        live = state.records.numpy() if self._is_host else self._memory
        self._memory_of_loops = state.keys.constants.cpu().numpy(), self._memory, live, self.judged
        self._learned: NDArray[np.bool_] = np.zeros(0 if self._is_host else len(self._memory), np.bool_)
        self._is_behind = False
        self._loops = state.pools[0].loops
        self.fresh: list[Rows] = []

    def write(self, rows: Rows, records: Words) -> None:
        """These records are new, with what their pool adds in the place of the seal. Of equal rows the last counts.

        A device has them from `flush` on.
        """
        self._seal(rows, records)
        self._write(rows, records)
        if not self._is_host:
            self.fresh.append(rows)

    def load(self, pool: PoolState, slots: Rows, records: Words, step: int) -> None:
        """As `write`, of slots whose bytes were loaded in this step; a device has the records at once."""
        records[:, CONTENT_B] = 0
        self.seal_loaded(pool, slots, records, step)
        self.put(pool, slots, records)
        if not self._is_host:
            self.fresh.append(pool.base + slots)
        self.flush()

    def seal_loaded(self, pool: PoolState, slots: Rows, records: Words, step: int) -> None:
        """Records of slots whose bytes this step began to load."""
        records[:, STEP_SITE], records[:, SEAL] = two_words(step, pack_site("load", 0)), pool.seal_term
        self._seal(pool.base + slots, records)

    def put(self, pool: PoolState, slots: Rows, records: Words) -> None:
        """Sealed records are new; a device has them from whoever calls this."""
        self._write(pool.base + slots, records)

    def _seal(self, rows: Rows, records: Words) -> None:
        self._loops.seal_records(rows, records.view(np.int64), self._memory_of_loops[0])

    def _write(self, rows: Rows, records: Words) -> None:
        self._note(self._loops.write_records(rows, records.view(np.int64), *self.native_memory[1:]))

    def are_of(self, rows: Rows, grants: Rows) -> NDArray[np.bool_]:
        """[n] whether each of these rows was written under its grant."""
        is_current: NDArray[np.bool_] = self.table[rows, REQUEST_GENERATION] >> 32 == grants.view(np.uint64)
        return is_current

    def sealed(self, pool: PoolState, slots: Rows, seen: int) -> None:
        """A loop has written the records of a forward's slots; `seen`: what it has seen (native/layout.py)."""
        self._note(seen & REWRITTEN)
        if not self._is_host:
            self.fresh.append(slots[slots >= pool.view.null_slots] + pool.base)

    def move(
        self,
        origin: PoolState,
        pool: PoolState,
        move: Move,
        step: int,
        has_fingerprints: bool,
        grants: Rows,
        owners: Rows,
    ) -> tuple[int, bool]:
        """Records follow moved entries, in host memory fingerprints and damage too; `loops.move_records`.

        The furthest position of an entry, and whether some were never written; NOT_ALL, and nothing is written, where
        slots of some are none or null, or where one stays.
        """
        seen = self._loops.move_records(
            origin.struct_at,
            pool.struct_at,
            *(move.src, move.dst, move.src_names, move.dst_names),
            grants,
            owners,
            self._state.page_size,
            _MOVED << 32 | step & MASK_32,
            has_fingerprints,
            *self.native_memory,
        )
        if seen < 0:
            return NOT_ALL, False
        self._note(seen & REWRITTEN)
        if not self._is_host:
            self.fresh.append(pool.base + move.dst)
        return seen >> MOVED_BITS, bool(seen & BLANK)

    @property
    def flags_address(self) -> tuple[int, int]:
        """Addresses of what was judged and, on a device, of what was learned, by record; they stay."""
        return self.judged.ctypes.data, 0 if self._is_host else self._learned.ctypes.data

    def collected(self, rewritten: int) -> None:
        """As `learn`, of rows that a loop has marked; `rewritten`: not 0 where one of them was judged."""
        self._is_behind = not self._is_host
        self._note(rewritten)

    def learn(self, rows: Rows) -> None:
        """Both copies on the device hold new records in these rows, which a captured forward has sealed itself."""
        if not self._is_host:
            self._learned[rows] = self._is_behind = True
        self._note(int(np.count_nonzero(self.judged[rows])))

    @property
    def memory(self) -> Rows:
        if self._is_behind:
            self._catch_up()
        return self._memory

    @property
    def table(self) -> Words:
        return self.memory.view(np.uint64)

    @property
    def native_memory(self) -> tuple[Rows, Rows, Rows, NDArray[np.bool_]]:
        if self._is_behind:
            self._catch_up()
        return self._memory_of_loops

    def _catch_up(self) -> None:
        """Read what was learned since somebody last looked; waits for the device."""
        rows = np.flatnonzero(self._learned)
        where = torch.from_numpy(rows).to(self._state.expected.device)
        self._memory[rows] = self._state.expected.index_select(0, where).cpu().numpy()
        self._learned[rows] = self._is_behind = False

    def flush(self) -> None:
        """Write what is new to the device."""
        if not self.fresh:
            return
        state, rows = self._state, np.concatenate(self.fresh)
        where, records = (to_device(torch.from_numpy(own), state.records.device) for own in (rows, self.memory[rows]))
        state.records.index_copy_(0, where, records)
        state.expected.index_copy_(0, where, records)
        self.fresh.clear()

    def _note(self, rewritten: int) -> None:
        """Whether an entry that was judged is another one now."""
        if rewritten:
            self.epoch += 1
            self.judged[:] = False


def two_words(low: Any, high: Any) -> Any:
    """A record's column that holds two unsigned 32-bit words: plain integers, or arrays of uint64."""
    return low & MASK_32 | high << 32


def no_records(n: int) -> Words:
    """[n, 8] records to fill in."""
    return np.empty((n, COLUMNS), np.uint64)
