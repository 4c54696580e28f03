"""Captured forwards of a replay: the buffers as the device had them, and the body over them, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcanary.captured.accepted_tokens import CapturedAcceptance, entries_behind
from kvcanary.captured.buffers import NULL_SLOT, Batch, StaticBuffers
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.dumps.reading import Call
from kvcanary.ledger.row_truth import RowTruth
from kvcanary.native.layout import ROWS
from kvcanary.pools.plans import ReadPlan, WritePlan
from kvcanary.records.state import PoolState
from kvcanary.replay.stage import Stage
from kvcanary_kernels.record.layout import chain_host, signed


def captured_batch(substep: CapturedSubstep, event: Call, read: ReadPlan, write: WritePlan, truth: RowTruth) -> Batch:
    """What a launch puts into the buffers; rows name what checks saw there, and else what their plans say.

    A place behind the row's end was seen in a later run, which had the buffers when the host looked: it is left out.
    """
    indices, width = read.indices.clone(), event["width"]
    for row, place, slot in event["strays"].reshape(-1, 3).tolist():
        begin, end = read.indptr[row : row + 2].tolist()
        if 0 <= place < end - begin:
            indices[begin + place] = slot
    by_row = [torch.from_numpy(values).repeat_interleave(width) for values in truth.numbers[: ROWS.uncollected]]
    written = torch.as_tensor(read.num_written)
    return Batch(
        read.indptr,
        indices,
        torch.cat((written.new_zeros(1), written.cumsum(0))),
        write.slots,
        write.tokens,
        write.positions,
        prefix_lens=by_row[1],
        uids=by_row[0],
        parents=write.parents,
        truths=by_row[2] if substep.forward.truths is not None else None,
        roots=by_row[3] if substep.forward.roots is not None else None,
        lineage=write.lineage,
    )


def advanced(truth: RowTruth, pool: PoolState, accepted: Sequence[Sequence[int]]) -> RowTruth:
    """The same of rows as they are, `accepted` by request: behind what the host knows lies what the last step accepted.

    As the device does it (`CapturedTruth`).
    """
    now = truth.copy()
    lens, truths = now.numbers[ROWS.lengths], now.numbers[ROWS.chains]
    for number, tokens in enumerate(accepted):
        count = entries_behind(pool, len(tokens))
        if now.numbers[ROWS.uncollected, number] and count > 0:
            chains = chain_host(list(tokens[:count]), int(lens[number]), int(truths[number]), pool.keys)
            lens[number], truths[number] = lens[number] + count, signed(chains[-1])
    return now


def record_accepted(acceptance: CapturedAcceptance, accepted: Sequence[Sequence[int]]) -> None:
    """What a step has accepted, by request."""
    rows = torch.zeros(acceptance.size, 1 + acceptance.places, dtype=torch.int64)
    for row, tokens in zip(rows, accepted, strict=False):
        row[: 1 + len(tokens)] = torch.tensor([len(tokens), *tokens])
    acceptance.record(torch.arange(len(rows)), rows[:, 0], rows[:, 1:])


def run_captured(stage: Stage, substep: CapturedSubstep, event: Call, batch: Batch) -> None:
    """One run of its body, which stores made-up values where the engine's stored its own."""
    buffers, pool = substep.buffers, substep.pool
    if buffers is None:
        raise ValueError("a captured forward of a replay has buffers")
    buffers.fill(batch)
    for row, entry, slot in event["padding"].reshape(-1, 3).tolist():
        _aim_padding(buffers, row, entry, slot)
    mask = read_mask(event)
    if substep.masks is not None and mask is not None:
        substep.masks.device[: len(mask)] = mask
    substep.open()
    slots = substep.work.planned.safe_slots
    is_stored = (slots >= 0) & (torch.arange(len(slots)) < batch.num_entries)
    layers = [layer for layer in range(pool.view.num_layers) if event["stored"] >> layer & 1]
    for layer in (*layers, *event["again"].tolist()):
        stage.store(substep.store, pool, layer, slots, is_stored)
    if substep.judges_bytes:
        _attend(substep, buffers.indices[: int(buffers.indptr[-1])])
    substep.close()


def _attend(substep: CapturedSubstep, indices: Tensor) -> None:
    """What attention reads along these is fingerprinted; ids outside the pool are read as the null slot."""
    num_slots = substep.pool.view.num_slots
    slots = torch.where((indices >= 0) & (indices < num_slots), indices, NULL_SLOT)
    for layer in range(substep.pool.view.num_layers):
        reads = substep.reads(layer)
        if reads is not None:
            reads.add_torch(slice(0, len(slots)), slots)


def read_mask(event: Call) -> Tensor | None:
    """[requests, N, N] bool: what nodes of trees see; None: it has no trees."""
    if event.get("mask") is None:
        return None
    shape = event["mask_shape"].tolist()
    bits = np.unpackbits(event["mask"].astype(np.uint8), count=int(np.prod(shape)))
    return torch.from_numpy(bits.astype(np.bool_).reshape(shape))


def _aim_padding(buffers: StaticBuffers, row: int, entry: int, slot: int) -> None:
    """W9: an entry, or else a row, that nobody uses lies at a slot which is somebody's."""
    if entry >= 0:
        buffers.slots[entry] = slot
        return
    end = int(buffers.indptr[row + 1])
    buffers.indices[end] = slot
    buffers.indptr[row + 1 :] += 1
