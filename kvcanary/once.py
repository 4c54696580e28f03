"""Once: the substep of a forward that comes once, over tensors that an engine made for it."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary.arena import ALIGNMENT, Arena
from kvcanary.launches import HEADER, Settings, Shared
from kvcanary.state import PoolState
from kvcanary.static import StaticSubstep
from kvcanary.views import ReadPlan, WritePlan
from kvcanary_kernels.count import NUM_BITS, UNSET
from kvcanary_kernels.forward import ForwardPlan
from kvcanary_kernels.table import PageTable

if TYPE_CHECKING:
    from kvcanary.graphs import RowTruth

ENTRY_TENSORS, ROW_TENSORS, TOLD_TENSORS = 18, 10, 14  # that a forward has, and rather more: an arena's room


def once(
    shared: Shared,
    pool: PoolState,
    site: tuple[str, int],
    read: ReadPlan,
    write: WritePlan,
    written: list[int],
    truth: RowTruth,
) -> StaticSubstep:
    """The substep of one forward over the engine's own tensors, all of whose rows are live."""
    rows, entries, reads = len(written), write.slots.shape[0], read.indices.shape[0]
    room = _room_for(pool, rows, entries, reads)
    uids, prefix_lens, truths, roots = torch.tensor(truth)
    indices = _aligned(read.indices)
    plan = ForwardPlan(
        PageTable(indices.as_strided((1, reads), (ALIGNMENT, 1)), 1),  # of one row: no kernel is compiled for its width
        read.indptr[:-1],
        read.indptr[1:],
        room(torch.tensor([0, *accumulate(written)])),
        _aligned(write.slots),
        _aligned(write.tokens),
        _aligned(write.positions),
        None,
        room(prefix_lens),
        room(truths),
        room(uids),
        room(torch.tensor([rows])),
        roots=room(roots),
    )
    substep = StaticSubstep(shared, pool, site, plan, room(HEADER), None, Settings(puts=True), room)
    room.send()
    return substep


def _room_for(pool: PoolState, rows: int, entries: int, reads: int) -> Arena:
    rows, entries = rows + ALIGNMENT, entries + ALIGNMENT
    num_zeros = ENTRY_TENSORS * entries + ROW_TENSORS * rows + reads + ALIGNMENT + HEADER
    num_told = TOLD_TENSORS * rows + 2 * NUM_BITS * len(UNSET)
    with torch.inference_mode(False):
        return Arena(pool.records.device, num_zeros, num_told)


def _aligned(values: Tensor) -> Tensor:
    """The same numbers, dense, where kernels need not be compiled anew for them."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % ALIGNMENT else values
