"""Graphs: the manager's static substeps, what the host learns of their writes, and their harvest as findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvcanary.bank import SubstepBank
from kvcanary.buffers import UNKNOWN
from kvcanary.captured_move import StaticMove
from kvcanary.certificate import Coverage
from kvcanary.errors import PlanError
from kvcanary.forward import Forward, Ints, on_host
from kvcanary.harvest import CoverageGap, StaticHit
from kvcanary.hits import Hit
from kvcanary.ledger import Ledger, Request
from kvcanary.mirror import Mirror
from kvcanary.state import CanaryState, PoolState
from kvcanary.static import StaticSubstep
from kvcanary.truths import note_row
from kvcanary.views import ReadPlan, WritePlan
from kvcanary_kernels.record import TOKEN_POSITION, signed


class RowTruth(NamedTuple):
    """What the host knows of the rows that a captured forward is launched with, by request.

    uids:        of the requests
    prefix_lens: final entries of their rows; UNKNOWN (-1) where a token of these is not known to the host yet
    truths:      chain value at that length, as int64
    """

    uids: list[int]
    prefix_lens: list[int]
    truths: list[int]


class Listener(Protocol):
    """Who keeps what the host learns of captured forwards."""

    def learned(self, forward: Forward, ancestors: Ints, layers: Sequence[int]) -> None:
        """The first of its site and step of which nothing was told; `ancestors`: [rows, n]."""

    def moved(self, src: Ints, dst: Ints) -> None:
        """The first launched move of which nothing was told."""

    def noticed(self, hit: StaticHit) -> None:
        """A check on the device fired."""


class Launched(NamedTuple):
    """A captured forward that the host has launched and knows nothing more of; committed: by request, at that time."""

    substep: StaticSubstep
    requests: list[Request]
    committed: list[int]
    step: int


class Written(NamedTuple):
    """Buffers of a captured forward in host memory, as `ForwardPlan` and `Planned` name them; empty: it has none."""

    bounds: Tensor
    starts: Tensor
    ends: Tensor
    slots: Tensor
    tokens: Tensor
    positions: Tensor
    safe_slots: Tensor
    ancestors: Tensor
    parents: Tensor
    mask: Tensor


class StaticChecks:
    """Substeps that are captured or replayed: they judge on the device, and the host reads what fired once a step.

    launched, moves: forwards and moves of which the host has not learned yet
    listener:        who is told what was learned of them, and of every hit
    """

    def __init__(self, state: CanaryState, ledger: Ledger, coverage: Coverage, listener: Listener) -> None:
        self._state, self._ledger, self._coverage, self.listener = state, ledger, coverage, listener
        self.bank = SubstepBank(state)
        self.launched: list[Launched] = []
        self.moves: list[StaticMove] = []
        self._num_learned = 0

    def launch(
        self, substep: StaticSubstep, requests: list[Request], step: int, written: Sequence[int], reads: int
    ) -> RowTruth:
        """These requests are the live rows of a forward that runs next, and each of their rows writes so much."""
        self.bank.expect(substep, len(requests) * substep.width, sum(written) * substep.width, reads)
        self.launched.append(Launched(substep, requests, [request.committed_len for request in requests], step))
        truth, pool_id = RowTruth([request.uid for request in requests], [], []), substep.pool.pool_id
        for request, count in zip(requests, written, strict=True):
            length = request.final_len(pool_id)
            chain = self._ledger.truth(request, pool_id, length)
            self._coverage.skip("truth not known to the host", chain is None)
            truth.prefix_lens.append(UNKNOWN if chain is None else length)
            truth.truths.append(0 if chain is None else signed(chain))
            note_row(request, substep.site[0], pool_id, length + count)
        return truth

    def is_running(self, request: Request) -> bool:
        """Whether a forward of this request was launched of which the host has not learned yet."""
        return any(request is other for launched in self.launched for other in launched.requests)

    def learn(self, mirror: Mirror) -> list[Forward]:
        """The forwards that were launched, as the host's checks take them, and in the mirror what they have written.

        Waits for the device.
        """
        launched, self.launched = self.launched, []
        forwards, rows = [], []
        for run, written in zip(launched, _written([run.substep for run in launched]), strict=True):
            forward = _forward_of(run, written)
            if forward is None:
                self._coverage.skip("captured forwards whose plans contradict themselves", 1)
                continue
            slots = on_host(written.safe_slots[: forward.num_entries])
            slots = slots[slots >= forward.pool.view.null_slots]
            self._ledger.pages.wrote(slots // self._ledger.page_size)
            rows.append(slots + forward.pool.base)
            forwards.append(forward)
            ancestors = on_host(written.ancestors)[: forward.num_rows]
            self.listener.learned(forward, ancestors, run.substep.layers)
        if rows:
            mirror.learn(np.concatenate(rows))
        self._num_learned = len(forwards)
        return forwards

    def learn_moves(self, mirror: Mirror) -> list[tuple[PoolState, Ints]]:
        """Pools, and the slots in them into which launched moves have brought other entries; after `learn`."""
        moves, self.moves, arrived = self.moves, [], []
        sources = _on_host_together([move.src for move in moves])
        destinations = _on_host_together([move.dst for move in moves])
        for move, source, destination in zip(moves, sources, destinations, strict=True):
            pool, slots = move.pool, on_host(destination)
            is_moved = slots >= 0
            slots = slots[is_moved]
            self.listener.moved(on_host(source)[is_moved], slots)
            if len(slots):
                mirror.learn(slots + pool.base)
                positions = mirror.table[slots + pool.base, TOKEN_POSITION] >> 32
                self._ledger.note_moved(pool.pool_id, slots, positions.view(np.int64))
                arrived.append((pool, slots))
        return arrived

    @property
    def step(self) -> int:
        """The one that runs."""
        return int(self.bank.step)

    def harvest(self) -> list[Hit]:
        """Hits and gaps since the last harvest; after the step has been synchronised."""
        harvest = self.bank.harvest()
        for hit in harvest.hits:
            self.listener.noticed(hit)
        rows, entries, reads = harvest.runs
        self._coverage.forwards += max(self._num_learned, int(rows > 0))
        self._num_learned = 0
        self._coverage.slots_checked += reads
        self._coverage.slots_sealed += entries
        self._coverage.unproved_stores += entries > 0
        return [self._hit(hit) for hit in harvest.hits] + [self._gap(gap) for gap in harvest.gaps]

    def _hit(self, hit: StaticHit) -> Hit:
        pool = self._state.by_name[hit.pool]
        position = hit.place if hit.place >= 0 else None
        name = self._ledger.name(hit.uid) if hit.uid >= 0 else None
        return Hit(hit.code, pool, hit.slot, position, name, hit.site, hit.step)

    def _gap(self, gap: CoverageGap) -> Hit:
        expected = {"rows": gap.planned_rows, "entries": gap.planned_entries, "reads": gap.planned_reads}
        found = {"rows": gap.run_rows, "entries": gap.run_entries, "reads": gap.run_reads}
        pool = self._state.by_name[gap.pool]
        return Hit("H1", pool, -1, None, None, gap.site, self.step, expected=expected, found=found)


def _written(substeps: Sequence[StaticSubstep]) -> list[Written]:
    """What these forwards have written, in host memory: one copy for all of them."""
    device = []
    for substep in substeps:
        plan, mask = substep.forward, substep.tree_mask
        parents = plan.slots[:0] if plan.parents is None else plan.parents
        mask = plan.slots[:0] if mask is None else mask
        own = plan.bounds, plan.row_starts, plan.row_ends, plan.slots, plan.tokens, plan.positions
        device += [*own, substep.work.planned.safe_slots, substep.work.ancestors, parents, mask]
    host = _on_host_together(device)
    count = len(Written._fields)
    return [Written(*host[first : first + count]) for first in range(0, len(host), count)]


def _on_host_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in host memory; bool comes as int64 from a device."""
    if not tensors or tensors[0].is_cpu:
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _forward_of(run: Launched, written: Written) -> Forward | None:
    """The plans of a captured forward as its buffers hold them; None where lengths make no plan (R10 tells)."""
    substep, plan = run.substep, run.substep.forward
    num_rows = len(run.requests) * substep.width
    bounds, starts, ends = (on_host(part) for part in (written.bounds, written.starts, written.ends))
    counts = np.diff(bounds[: num_rows + 1])
    entries = slice(0, int(bounds[num_rows]))
    prefixes = (ends[:num_rows] - starts[:num_rows] - counts - plan.ancestors)[:: substep.width]
    indptr = np.append(starts[:num_rows], ends[num_rows - 1 : num_rows])
    try:
        read = ReadPlan(
            indptr=torch.from_numpy(indptr),
            indices=plan.table.pages[0, : max(int(indptr[-1]), 0)],
            requests=tuple(request.request_id for request in run.requests),
            rows_per_request=substep.width,
            prefix_lens=torch.from_numpy(np.ascontiguousarray(prefixes)),
            num_written=torch.from_numpy(counts),
            tree_mask=None if substep.tree_mask is None else written.mask[: len(run.requests)].bool(),
        )
        write = WritePlan(
            written.slots[entries],
            written.tokens[entries],
            written.positions[entries],
            None if plan.parents is None else written.parents[entries],
        )
        kind, index = substep.site
        forward = Forward(kind, index, substep.pool, run.step, run.requests, read, write)
    except PlanError:
        return None
    forward.committed[:] = run.committed
    return forward
