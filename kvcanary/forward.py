"""Forward: one model call as the canary keeps it from `open` until its checks have run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.ledger import Request
from kvcanary.state import PoolState
from kvcanary.twin import SLOT_BYTES
from kvcanary.views import ReadPlan, WritePlan

#: By slot that a draft node of this step has written: its request, its prefix length and its ancestors with itself.
Paths = dict[int, tuple[Request, int, list[int]]]


@dataclass(slots=True, eq=False)
class Forward:
    """What a forward was told to read and write, and what it stored.

    indices, slots: the plans' own, or copies in which refused ids are null slot 0
    raw:            `indices` as bytes
    prefixes:       by request, entries that earlier steps made final
    bounds:         by row and one more, where rows begin in `indices`
    written:        by row, entries at its end that this forward writes
    tails:          by row, slots after its prefix: ancestors of a draft node, then what this forward writes
    write_slots, write_positions, write_parents: the write plan as plain integers; parents None: chains
    odd_rows:       rows that name other slots for their prefix than the request's known row
    lost_rows:      rows whose ancestors are not the path of a draft node of this step
    astray_rows:    rows whose last entries are not the slots that this forward writes
    refused:        entries of the write plan that were refused (W1), with the slot that was asked for
    refused_reads:  entries of `indices` that were refused (R1), with the slot that was asked for
    k, v:           by layer, the values stored; None where nothing was, or where `lanes` were taken at once
    """

    kind: str
    index: int
    pool: PoolState
    step: int
    read: ReadPlan
    write: WritePlan
    requests: list[Request]
    indices: Tensor
    slots: Tensor
    raw: bytes
    prefixes: list[int]
    bounds: list[int]
    written: list[int]
    write_slots: list[int]
    write_positions: list[int]
    write_parents: list[int] | None
    tails: list[list[int]] = field(default_factory=list)
    odd_rows: list[int] = field(default_factory=list)
    lost_rows: list[int] = field(default_factory=list)
    astray_rows: list[int] = field(default_factory=list)
    refused: dict[int, int] = field(default_factory=dict)
    refused_reads: dict[int, int] = field(default_factory=dict)
    k: list[Tensor | None] = field(default_factory=list)
    v: list[Tensor | None] = field(default_factory=list)
    lanes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def site(self) -> tuple[str, int]:
        return self.kind, self.index

    @property
    def stored(self) -> int:
        """Bitmap of the layers that have stored."""
        return sum(1 << layer for layer, k in enumerate(self.k) if k is not None or layer in self.lanes)

    def prefix_len(self, row: int) -> int:
        return self.prefixes[row // self.read.rows_per_request]

    def request_of(self, row: int) -> Request:
        return self.requests[row // self.read.rows_per_request]

    def row_slots(self, start: int, end: int) -> list[int]:
        """Entries [start, end) of `indices` as plain integers."""
        return slot_ids(self.raw[start * SLOT_BYTES : end * SLOT_BYTES])


def slot_ids(raw: bytes) -> list[int]:
    """Slot ids from the bytes of an index array."""
    return memoryview(raw).cast("q").tolist()


def plan_forward(
    kind: str,
    index: int,
    pool: PoolState,
    step: int,
    requests: list[Request],
    read: ReadPlan,
    write: WritePlan,
    paths: Paths,
) -> Forward:
    """Read both plans into plain integers once; refuse ids outside the pool, and plans that contradict themselves."""
    rows = len(requests) * read.rows_per_request
    written = read.num_written.tolist() if isinstance(read.num_written, Tensor) else [read.num_written] * rows
    layers = pool.view.num_layers
    forward = Forward(
        kind,
        index,
        pool,
        step,
        read,
        write,
        requests,
        read.indices,
        write.slots,
        _raw_bytes(read.indices),
        read.prefix_lens.tolist(),
        read.indptr.tolist(),
        written,
        write.slots.tolist(),
        write.positions.tolist(),
        None if write.parents is None else write.parents.tolist(),
        k=[None] * layers,
        v=[None] * layers,
    )
    _check_sizes(forward)
    num_slots = pool.view.num_slots
    if not _inside(forward.write_slots, num_slots):
        forward.slots, forward.refused = _without(write.slots, num_slots)
        forward.write_slots = forward.slots.tolist()
    if not _split_rows(forward, paths):
        forward.indices, forward.refused_reads = _without(read.indices, num_slots)
        forward.raw = _raw_bytes(forward.indices)
        for rows_of_kind in (forward.tails, forward.odd_rows, forward.lost_rows, forward.astray_rows):
            rows_of_kind.clear()
        _split_rows(forward, paths)
    return forward


def _split_rows(forward: Forward, paths: Paths) -> bool:
    """Compare every row, byte by byte, with what is known; False where an id is outside the pool.

    The prefix must be the known row, ancestors the path of their writer, the last entries what the forward writes.
    """
    raw, bounds, slots, width = forward.raw, forward.bounds, forward.write_slots, forward.read.rows_per_request
    num_slots, draft = forward.pool.view.num_slots, forward.kind == "draft"
    ids = memoryview(raw).cast("q")
    row = first = 0
    for number, request in enumerate(forward.requests):
        length, known = forward.prefixes[number], request.known[forward.pool.pool_id]
        prefix = known.raw if len(known.raw) == length * SLOT_BYTES else known.raw[: length * SLOT_BYTES]
        for _ in range(width):
            start, end, written = bounds[row], bounds[row + 1], forward.written[row]
            middle, own = start + length, end - written
            if length < 0 or own < middle:
                raise PlanError(
                    f"row {row} of {forward.kind} has {end - start} entries, "
                    f"fewer than its prefix of {length} and the {written} it writes"
                )
            if len(prefix) < length * SLOT_BYTES and _inside(
                ids[start + len(prefix) // SLOT_BYTES : middle], num_slots
            ):
                prefix = known.extend(raw[start * SLOT_BYTES : middle * SLOT_BYTES])
            if len(prefix) < length * SLOT_BYTES or not raw.startswith(prefix, start * SLOT_BYTES):
                forward.odd_rows.append(row)
                if not _inside(ids[start:middle], num_slots):
                    return False
            tail = ids[middle:end].tolist()
            mine = slots[first : first + written]
            if middle < own:
                ancestors = tail[: own - middle]
                path = paths.get(ancestors[-1])
                if path is None or path[0] is not request or path[1] != length or path[2] != ancestors:
                    forward.lost_rows.append(row)
                    if not _inside(ancestors, num_slots):
                        return False
            if tail[own - middle :] != mine:
                forward.astray_rows.append(row)
                if not _inside(tail, num_slots):
                    return False
            if draft and written == 1:
                paths[mine[0]] = request, length, tail
            forward.tails.append(tail)
            first += written
            row += 1
    return True


def _inside(ids: Sequence[int], num_slots: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < num_slots)


def _without(ids: Tensor, num_slots: int) -> tuple[Tensor, dict[int, int]]:
    """`ids` with null slot 0 in the place of those outside the pool, and these by entry."""
    outside = (ids < 0) | (ids >= num_slots)
    entries = outside.nonzero().flatten()
    refused = dict(zip(entries.tolist(), ids[entries].tolist(), strict=True))
    return torch.where(outside, 0, ids), refused


def _raw_bytes(indices: Tensor) -> bytes:
    host = indices if indices.is_cpu and indices.is_contiguous() else indices.cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel() * SLOT_BYTES)


def _check_sizes(forward: Forward) -> None:
    bounds, entries, n = forward.bounds, len(forward.raw) // SLOT_BYTES, len(forward.write_slots)
    if bounds[0] != 0 or bounds[-1] != entries:
        raise PlanError(f"indptr must run from 0 to the {entries} indices, got {bounds[0]} to {bounds[-1]}")
    if sum(forward.written) != n:
        raise PlanError(f"the rows write {sum(forward.written)} entries, the write plan has {n}")
