"""Forward: one model call as the canary keeps it from `open` until its checks have run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.groups import window_start
from kvcanary.ledger import Request
from kvcanary.state import PoolState
from kvcanary.views import ReadPlan, WritePlan

Ints = NDArray[np.int64]


class Refused(NamedTuple):
    """Entries of a plan that were refused, the ids that were asked for, and why; all [n].

    entries:    int64
    ids, names: int64, slots of the pool, and the ids in the plan: of the full group where the pool has a slot map
    codes:      of their findings
    """

    entries: Ints
    ids: Ints
    names: Ints
    codes: NDArray[np.str_]


class Planned(NamedTuple):
    """The entries of a write plan as they were when the forward was opened; an engine may reuse its tensors.

    slots, tokens, positions: [n] int64; slots of the pool that are safe to write
    """

    slots: Ints
    tokens: Ints
    positions: Ints


SLOT_BYTES = 8  # of a slot id in an index array


@dataclass(slots=True, eq=False)
class Forward:
    """What a forward was told to read and write, and what it stored.

    width:          rows a request: 1, or the tree width of a draft substep
    planned:        the entries that it writes
    indices, slots: the plans' own, or copies in which refused ids are null slot 0
    pool_indices, pool_slots: where these lie in the pool, null slot 0 where nowhere; the same without a slot map
    names, ids:     `indices` and `pool_indices` as integers, from `read_rows` on; `raw`: `indices` as bytes
    slot_names:     [n] int64, `slots` as integers
    bounds:         by row and one more, where rows begin in `indices`
    starts:         by row, the position of its first entry
    skipped:        by row, entries at its head that lie before its window: they are not judged
    tree_mask:      [requests, N, N] bool, or None
    prefixes:       by request, entries of each of its rows that earlier forwards wrote and acceptance made final, as
                    the plan has it; `committed` is what acceptance has made final
    written:        by row, entries at its end that this forward writes
    owns, begins:   by row, where these begin in `indices`, and their first position
    write_slots:    `pool_slots` as plain integers
    parents:        by entry of the write plan, its tree parent in the plan or -1; None: every row is a chain
    refused:        entries of the write plan that were refused (W1, W2, W3, W7, W8); None: none were
    refused_reads:  entries of `indices` that were refused (R1)
    stored:         bitmap of the layers that have stored
    room, lanes:    by layer, where K, V and extras are copied to, or their lanes where these are taken at once; neither
                    where nobody will compare the bytes
    stage_row:      of the stage, where `room` begins
    """

    kind: str
    index: int
    pool: PoolState
    step: int
    requests: list[Request]
    width: int
    indices: Tensor
    slots: Tensor
    planned: Planned
    tree_mask: Tensor | None
    bounds: list[int]
    starts: list[int]
    prefixes: list[int]
    committed: list[int]
    written: list[int]
    owns: list[int]
    begins: list[int]
    write_slots: list[int]
    parents: list[int] | None
    pool_indices: Tensor
    pool_slots: Tensor
    slot_names: Ints
    skipped: list[int]
    refused: Refused | None = None
    refused_reads: Refused | None = None
    room: list[tuple[Tensor, ...]] = field(default_factory=list)
    stage_row: int = 0
    lanes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    stored: int = 0
    raw: bytes = b""
    names: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def site(self) -> tuple[str, int]:
        return self.kind, self.index

    def read_rows(self) -> None:
        """Take the slot ids of all rows to the host."""
        self.raw = on_host(self.indices).tobytes()
        self.names = self.ids = np.frombuffer(self.raw, np.int64)
        if self.pool.view.slot_map is not None:
            self.ids = on_host(self.pool_indices)

    def request_of(self, row: int) -> Request:
        return self.requests[row // self.width]


def plan_forward(
    kind: str, index: int, pool: PoolState, step: int, requests: list[Request], read: ReadPlan, write: WritePlan
) -> Forward:
    """Read both plans to the host once; refuse plans that contradict themselves."""
    if isinstance(read.num_written, Tensor):
        written = read.num_written.tolist()
    else:
        written = [read.num_written] * (len(requests) * read.rows_per_request)
    bounds = read.indptr.tolist()
    owns = [end - count for end, count in zip(bounds[1:], written, strict=True)]
    starts = [0] * len(owns) if read.starts is None else read.starts.tolist()
    begins = [start + own - bound for start, own, bound in zip(starts, owns, bounds, strict=False)]
    planned = Planned(*(on_host(values).copy() for values in (write.slots, write.tokens, write.positions)))
    forward = Forward(
        kind,
        index,
        pool,
        step,
        requests,
        read.rows_per_request,
        read.indices,
        write.slots,
        planned,
        read.tree_mask,
        bounds,
        starts,
        read.prefix_lens.tolist(),
        [request.committed_len for request in requests],
        written,
        owns,
        begins,
        write.slots.tolist(),
        None if write.parents is None else write.parents.tolist(),
        read.indices,
        write.slots,
        planned.slots,
        _before_window(pool, starts, begins),
    )
    _check_sizes(forward)
    _check_parents(forward)
    return forward


def _before_window(pool: PoolState, starts: list[int], begins: list[int]) -> list[int]:
    """By row, how many of its entries the first one that it writes does not see."""
    if pool.view.window is None:
        return [0] * len(starts)
    firsts = [window_start(pool.view, begin) for begin in begins]
    return [max(0, first - start) for first, start in zip(firsts, starts, strict=True)]


def on_host(values: Tensor) -> Ints:
    """An int64 tensor as an array; of the same memory where that is possible."""
    return (values if values.is_cpu else values.cpu()).numpy()


def _check_sizes(forward: Forward) -> None:
    bounds, entries, n = forward.bounds, forward.indices.shape[0], len(forward.write_slots)
    if bounds[0] != 0 or bounds[-1] != entries:
        raise PlanError(f"indptr must run from 0 to the {entries} indices, got {bounds[0]} to {bounds[-1]}")
    if sum(forward.written) != n:
        raise PlanError(f"the rows write {sum(forward.written)} entries, the write plan has {n}")
    mask = forward.tree_mask
    if mask is not None and (len(mask) != len(forward.written) or set(forward.written) - {mask.shape[1]}):
        raise PlanError(
            f"tree_mask must be [{len(forward.written)}, N, N] for rows that write N entries each, got "
            f"{list(mask.shape)} for rows of {forward.written}"
        )
    for row, begin in enumerate(forward.begins):
        prefix = forward.prefixes[row // forward.width]
        start = forward.starts[row]
        if not 0 <= prefix <= begin or not 0 <= start <= begin:
            since = f" from position {start} on" if start else ""
            raise PlanError(
                f"row {row} of {forward.kind} has {bounds[row + 1] - bounds[row]} entries{since}, "
                f"fewer than its prefix of {prefix} and the {forward.written[row]} it writes"
            )


def _check_parents(forward: Forward) -> None:
    """Nodes come after their parents, and a row's parents lie in the row."""
    if forward.parents is None:
        return
    first = 0
    for written in forward.written:
        for entry, parent in enumerate(forward.parents[first : first + written], first):
            if parent != -1 and not first <= parent < entry:
                raise PlanError(f"parents[{entry}] must be -1 or in [{first}, {entry}), got {parent}")
        first += written
