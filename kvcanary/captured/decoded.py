"""Decoded: captured forwards as the host's rules take them, from what the device has reported of their runs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcanary.calls.forward import Ints, Planned
from kvcanary.calls.violation import NO_BRANCH, Lineage
from kvcanary.captured.launch_group import Launched
from kvcanary.captured.readback import CapturedViolation
from kvcanary.captured.substep import MASKS, CapturedSubstep
from kvcanary.ledger.ledger import Request
from kvcanary.native.layout import plan_layout
from kvcanary.records.state import PoolState
from kvcanary_kernels.judge.count import NUM_BITS


class CollectedRun(NamedTuple):
    """What is kept of a captured forward that a loop has proved clean; `learned` makes of it what the rules take.

    numbers:    of several forwards; its own are [first, end): `num_kept` of its line, and behind them what the step
                before it has accepted, as `Launched` has it
    """

    substep: CapturedSubstep
    step: int
    num_requests: int
    numbers: array[int]
    first: int
    end: int

    @classmethod
    def of(cls, run: Launched) -> CollectedRun:
        """As `loops.collect_quiet` keeps it."""
        n, accepted = len(run.batch), () if run.accepted is None else run.accepted[: len(run.batch)].ravel()
        numbers = array("q", [*run.message.numbers[: run.substep.num_kept], *accepted])
        return cls(run.substep, run.step, n, numbers, 0, len(numbers))

    @property
    def num_bytes(self) -> int:
        """That it keeps."""
        return 8 * (self.end - self.first)

    def learned(self) -> DecodedForward:
        numbers = np.frombuffer(self.numbers, np.int64)[self.first : self.end]
        parts = [numbers[part] for part in self.substep.written.message_of(0).where[: MASKS + 1]]
        accepted = numbers[self.substep.num_kept :]
        tokens = tokens_of(accepted.reshape(self.num_requests, -1)) if len(accepted) else None
        own = self.substep, self.step, self.num_requests
        return DecodedForward(*own, [*parts, np.zeros(2 * NUM_BITS, np.int64)], tokens)


def tokens_of(accepted: Ints) -> list[list[int]]:
    """By request, of [requests, 1 + places]: how many tokens, then these."""
    return [row[1 : 1 + max(row[0], 0)] for row in accepted.tolist()]


class DecodedForward:
    """What a captured forward was told to write and how long its rows were; attributes as those of `Forward`.

    slots: of all live entries, those that were refused left out;  tree_mask: [requests, N, N] bool, or None
    ancestors: [rows, n], what each row reads between its prefix and what it writes
    lineage:  [n], as `Forward` has it, or None
    accepted: by request, the tokens of which the forward writes the entries, where only the device knew them; else None
    has_read_violations: whether a check of what was read has fired, in this forward or an earlier one of its substep
    """

    refused, has_starts = None, False

    def __init__(
        self,
        substep: CapturedSubstep,
        step: int,
        num_requests: int,
        written: Sequence[Ints],
        accepted: list[list[int]] | None = None,
        requests: Sequence[Request] = (),
    ) -> None:
        """`written`: as `CapturedSubstep.written` tells it; parts between masks and header are not looked at."""
        self.accepted, self.requests = accepted, requests
        bounds, starts, ends, slots, tokens, positions, parents, safe_slots, ancestors, words, *_, header = written
        self.has_read_violations = np.count_nonzero(header[NUM_BITS : 2 * NUM_BITS]) > 0
        self._indices, self._spans = substep.forward.indices, (starts, ends)
        self.kind, self.index = self.site = substep.site
        self.pool: PoolState = substep.pool
        self.step, self.width = step, substep.width
        self.num_rows = num_rows = num_requests * substep.width
        self._num_ancestors = substep.forward.ancestors
        self.ancestors: Ints = ancestors.reshape(substep.forward.num_rows, -1)[:num_rows]
        self._bounds = bounds[: num_rows + 1]
        self._counts = self._bounds[1:] - self._bounds[:-1]
        self._begins = ends[:num_rows] - starts[:num_rows] - self._counts
        self._live = live = slice(0, int(bounds[num_rows]))
        self.planned = Planned(slots[live], tokens[live], positions[live])
        self.num_entries, self.has_lineage = len(self.planned.slots), substep.forward.lineage is not None
        self.has_parents = len(parents) > 0 and not self.has_lineage
        self._parents: Ints | None = parents[live] if self.has_parents else None
        self.lineage: Ints | None = parents[live] if self.has_lineage else None
        safe = safe_slots[live]
        self.slots: Ints = safe[safe >= self.pool.view.null_slots]
        self.tree_mask = None
        if substep.masks is not None:
            self.tree_mask = torch.from_numpy(substep.masks.read(words)[:num_requests])

    @property
    def is_plan(self) -> bool:
        """Whether lengths and parents make a plan at all; where they do not, R10 and the write codes tell."""
        counts, begins, nodes = self._counts, self._begins, self._parents
        is_plan = not np.count_nonzero((counts | begins) < 0) and len(self.planned.slots) == self._live.stop
        if self.tree_mask is not None:
            is_plan = is_plan and bool((counts == self.tree_mask.shape[-1]).all())
        if not is_plan or nodes is None:
            return is_plan
        first = np.repeat(self._bounds[:-1], counts)
        return bool(((nodes == -1) | (nodes >= first) & (nodes < np.arange(len(nodes)))).all())

    @property
    def num_bytes(self) -> int:
        """Of the plans, where somebody keeps them."""
        mask = 0 if self.tree_mask is None else self.tree_mask.numel()
        plan = plan_layout(self.num_entries, self.num_rows, 0)
        return 8 * (plan.prefixes + self.ancestors.size) + mask

    def keep(self) -> None:
        """The plans stay as they are, whatever is told next; without what the rules of the step alone need."""
        slots, tokens, positions = self.planned
        self.planned = Planned(slots.copy(), tokens.copy(), positions.copy())
        self._parents, self.lineage = (None if one is None else one.copy() for one in (self._parents, self.lineage))
        self.ancestors, self._bounds = self.ancestors.copy(), self._bounds.copy()
        self.tree_mask = None if self.tree_mask is None else self.tree_mask.clone()
        self.requests, self._indices = (), self._indices[:0]

    @property
    def plan(self) -> Ints:
        """As `Forward.plan`."""
        none = np.zeros(self.num_rows, np.int64)
        reads = np.zeros(self.num_rows + 1, np.int64)
        np.add(self._begins, self._counts).cumsum(out=reads[1:])
        prefixes = (self._begins - self._num_ancestors)[:: self.width]
        known = (one for one in (self._parents, self.lineage) if one is not None)
        parents = next(known, np.full(self.num_entries, -1))
        rows = self._counts, none, reads[:-1] + self._begins, self._begins, none
        return np.concatenate((*self.planned, parents, reads, *rows, prefixes))

    @property
    def written(self) -> list[int]:
        return self._counts.tolist()

    @property
    def begins(self) -> list[int]:
        return self._begins.tolist()

    @property
    def parents(self) -> list[int] | None:
        return None if self._parents is None else self._parents.tolist()

    @property
    def slot_names(self) -> Ints:
        return self.planned.slots

    def rows(self) -> list[Ints]:
        """The slots that each row names, of a forward that came once; waits for the device."""
        indices, (starts, ends) = self._indices.cpu().numpy(), self._spans
        spans = zip(starts[: self.num_rows], ends[: self.num_rows], strict=True)
        return [indices[start:end] for start, end in spans]

    def request_of(self, row: int) -> Request:
        return self.requests[row // self.width]


def lineage_of(violation: CapturedViolation, runs: Sequence[Launched]) -> Lineage | None:
    """The same of what a captured forward, one of these runs, has found; None where its lineage says nothing of it."""
    run = next((run for run in runs if _is_of(violation, run)), None)
    if run is None or violation.code != "R5" or not violation.is_exact:
        return None
    last = next((last for last in runs if last.substep.work is run.substep.before and last.batch is run.batch), None)
    decoded = _decoded(run)
    if last is None or decoded.lineage is None or violation.place != decoded.begins[violation.row] - 1:
        return None
    first = violation.row // decoded.width * decoded.width
    slots = _decoded(last).planned.slots[first : first + decoded.width].tolist()
    found = slots.index(violation.slot) if violation.slot in slots else NO_BRANCH
    parent = int(decoded.lineage[violation.row])
    return None if found == parent else Lineage(violation.row - first, parent, found)


def _is_of(violation: CapturedViolation, run: Launched) -> bool:
    is_here = (violation.pool, violation.site) == (run.substep.pool.name, run.substep.site)
    return is_here and violation.row >= 0 and violation.uid in [request.uid for request in run.batch.requests]


def _decoded(run: Launched) -> DecodedForward:
    return DecodedForward(run.substep, run.step, len(run.batch), run.message.parts())
