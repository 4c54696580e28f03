"""One shot: substeps of forwards that come once, over buffers that are made for a size and filled anew for each."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvcanary.captured.arena import ALIGNMENT, Arena
from kvcanary.captured.buffers import NULL_SLOT
from kvcanary.captured.kernel_launches import HEADER, Settings, Shared
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.pools.plans import ReadPlan, WritePlan
from kvcanary.records.graph_cache import Replays
from kvcanary.records.state import PoolState
from kvcanary_kernels.judge.count import NUM_BITS, UNSET
from kvcanary_kernels.judge.forward import NO_SLOT, ForwardPlan

if TYPE_CHECKING:
    from kvcanary.ledger.row_truth import RowTruth

#: Tensors that a forward has, and rather more: an arena's room. The last: what the host knows, by row.
ENTRY_TENSORS, ROW_TENSORS, READ_TENSORS, INPUT_TENSORS = 20, 10, 3, 20
LEAST_SIZE, SPARE_BITS = 64, 4  # what is written is rounded up by an eighth at most, what is read to a power of two
MOST_IDLE_BYTES = 32 << 20  # of substeps that no forward has


class Size(NamedTuple):
    """Rows, entries that they write and entries that they read, for which there is room."""

    rows: int
    entries: int
    reads: int

    @classmethod
    def of(cls, rows: int, entries: int, reads: int) -> Size:
        """The least one for these; of few kinds, so that buffers are met again and no kernel is compiled anew."""
        reads = 1 << max(reads - 1, LEAST_SIZE - 1).bit_length()
        return cls(1 if rows == 1 else _rounded(rows), max(_rounded(entries), LEAST_SIZE), reads)

    @property
    def num_zeros(self) -> int:
        """Numbers that the device alone has."""
        rows, entries, reads = (n + ALIGNMENT for n in self)
        return ENTRY_TENSORS * entries + ROW_TENSORS * rows + READ_TENSORS * reads


Kind = tuple[int, tuple[str, int], Size]  # pool, site, size


class OneShotSubstep(CapturedSubstep):
    """The hooks of a forward whose rows are chains; it belongs to one forward from `load` until that was collected.

    size:    what it has room for;  planned: rows, entries written and entries read of the forward that has it
    num_bytes: of the device that it takes
    indices: [nnz] int64, as the read plan has them, and null slot 0 where they lie outside the pool
    """

    planned: list[int]
    indices: Tensor

    def __init__(self, shared: Shared, pool: PoolState, site: tuple[str, int], size: Size) -> None:
        self.size, self.num_bytes = size, 8 * size.num_zeros
        with torch.inference_mode(False):
            rows, entries, reads = size
            num_inputs = INPUT_TENSORS * (rows + ALIGNMENT) + HEADER + 2 * NUM_BITS * len(UNSET)
            room = self._room = Arena(pool.records.device, size.num_zeros, num_inputs)
            self._starts, self._input_starts = room.numbers(rows + 1)
            bounds, self._input_bounds = room.numbers(rows + 1)
            (uids, prefix_lens, truths, roots), self._input_rows = zip(*map(room.numbers, [rows] * 4), strict=True)
            (num_live, step), (self._input_live, self._input_step) = zip(*map(room.numbers, (1, 1)), strict=True)
            self._indices, self._slots, self._tokens, self._positions = map(room, (reads, entries, entries, entries))
            own = self._slots, self._tokens, self._positions, None, prefix_lens, truths, uids, num_live
            plan = ForwardPlan(self._indices, self._starts[:-1], self._starts[1:], bounds, *own, roots=roots)
            header = room(torch.zeros(HEADER, dtype=torch.int64))
            self._safe_indices = room(reads)
            self._is_outside = torch.zeros(reads, dtype=torch.bool, device=pool.records.device)
        super().__init__(replace(shared, step=step), pool, site, plan, header, None, Settings(puts=True), room)
        self._replays = Replays(pool.records.device)
        self._filled = size.entries, size.reads

    def load(self, read: ReadPlan, write: WritePlan, written: list[int], truth: RowTruth) -> None:
        """The plans of a forward that runs next, all of whose rows are live; behind the rows lies padding."""
        rows, entries, reads = self.planned = [len(written), write.slots.shape[0], read.indices.shape[0]]
        self._room.rewind()
        self._input_starts[:] = reads
        self._input_bounds[: rows + 1] = [0, *accumulate(written)]
        self._input_bounds[rows + 1 :] = entries
        for inputs, values in zip(self._input_rows, truth.numbers, strict=False):
            inputs[:rows] = values
        self._input_live[0], self._input_step[0] = rows, truth.step
        self._room.send()
        plans = read.indptr, read.indices, write.slots, write.tokens, write.positions
        own = self._starts, self._indices, self._slots, self._tokens, self._positions
        heads = [mine.narrow(0, 0, len(theirs)) for mine, theirs in zip(own, plans, strict=True)]
        torch._foreach_copy_(heads, list(plans))
        self._pad(entries, reads)
        planned = self.work.planned.safe_slots, self.work.twice
        self.slots, self._twice = (values.narrow(0, 0, entries) for values in planned)
        self.indices = self._safe_indices.narrow(0, 0, reads)

    def _pad(self, entries: int, reads: int) -> None:
        """Behind what the plans name nobody writes, and there is nothing to read."""
        last_entries, last_reads = self._filled
        if entries < last_entries:
            self._slots[entries:last_entries].fill_(NULL_SLOT)
        if reads < last_reads:
            self._indices[reads:last_reads].fill_(NO_SLOT)
        self._filled = entries, reads

    def _plan_and_seal(self) -> None:
        self._replays.run(None, self._plan_anew)

    def _plan_anew(self) -> None:
        super()._plan_and_seal()
        torch.clamp(self._indices, 0, self.pool.view.num_slots - 1, out=self._safe_indices)
        torch.ne(self._safe_indices, self._indices, out=self._is_outside)
        self._safe_indices.masked_fill_(self._is_outside, NULL_SLOT)


class Singles:
    """Substeps that no forward has, by pool, site and size, the longest idle kind first."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._idle: dict[Kind, list[OneShotSubstep]] = {}
        self._idle_bytes = 0

    def take(
        self,
        pool: PoolState,
        site: tuple[str, int],
        read: ReadPlan,
        write: WritePlan,
        written: list[int],
        truth: RowTruth,
    ) -> OneShotSubstep:
        """The substep of one forward: one of its size, or a new one."""
        size = Size.of(len(written), write.slots.shape[0], read.indices.shape[0])
        kind = pool.pool_id, site, size
        substep = self._take_idle(kind) if kind in self._idle else OneShotSubstep(self._shared, pool, site, size)
        substep.load(read, write, written, truth)
        return substep

    def give(self, substep: OneShotSubstep) -> None:
        """The host has collected its forward, and reads nothing more of it."""
        kind = substep.pool.pool_id, substep.site, substep.size
        self._idle[kind] = [*self._idle.pop(kind, ()), substep]
        self._idle_bytes += substep.num_bytes
        while self._idle_bytes > MOST_IDLE_BYTES:
            self._take_idle(next(iter(self._idle)))

    def _take_idle(self, kind: Kind) -> OneShotSubstep:
        idle = self._idle[kind]
        substep = idle.pop()
        if not idle:
            del self._idle[kind]
        self._idle_bytes -= substep.num_bytes
        return substep


def _rounded(n: int) -> int:
    step = max(ALIGNMENT, 1 << max(n - 1, 0).bit_length() >> SPARE_BITS)
    return max(-(-n // step), 1) * step
