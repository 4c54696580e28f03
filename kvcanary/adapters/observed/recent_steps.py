"""Recent steps: what an engine said and ran last, kept on the host in bounded memory until a finding asks for it.

Nothing is read from the device here. What a step appends is at hand anyway: names of rows, their numbers, and how long
rows were when that was last measured. Blocks are those of the engine's manager; `ratios` leads to those of tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.state import Group
from kvcanary.dumps.watched_events import ENDED, GRANTED, PREEMPTED

NONE: tuple[Any, ...] = ()


class RecentStep(NamedTuple):
    """One step as it was told.

    requests, numbers: of its rows, and where these stand among all rows of the engine
    lengths: [rows of the engine] int64, at least the entries of each in an earlier step;  grown: since then, of each
    events:  what happened since the step before, as in `dumps.watched_events`; tensors, and blocks as they came
    """

    number: int
    site: tuple[str, int]
    requests: Sequence[str]
    numbers: NDArray[np.integer[Any]]
    num_tokens: int
    lengths: NDArray[np.int64]
    grown: int
    events: Sequence[tuple[Any, ...]]

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        """Request, row number and length of each row; entries of this step included."""
        ends = (self.lengths[self.numbers] + self.grown).tolist()
        return list(zip(self.requests, self.numbers.tolist(), ends, strict=True))


class RecentSteps:
    """The last steps.

    groups: which of the manager's groups have entries; None: all
    ratios: by group of these, blocks of the tables that a block of the manager has
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._runs: deque[tuple[RecentStep, int]] = deque(maxlen=most)  # and how often each was repeated
        self._times = 0  # and the last one since that was put down
        self._own: dict[int, list[tuple[Any, ...]]] = {}  # what happened before steps that were repeated ones
        self.groups: Sequence[int] | None = None
        self.ratios: list[int] = []
        self._events: list[tuple[Any, ...]] = []
        self._told: tuple[int, list[dict[str, Any]]] = (0, [])  # the last step of them

    def scheduled(self, output: Any) -> list[tuple[str, Any, int | None]]:
        """What vLLM's scheduler says of the step that is next: blocks that requests are given, and who ends.

        Gives the requests that are given blocks, these by group, and how many entries they had, where these are all
        its blocks; None: they follow those that it had.
        """
        if output.finished_req_ids:
            self._events += [(ENDED, name) for name in sorted(output.finished_req_ids)]
        if output.preempted_req_ids:
            self._events += [(PREEMPTED, name) for name in sorted(output.preempted_req_ids)]
        granted: list[tuple[str, Any, int | None]] = [
            (new.req_id, _kept(new.block_ids or ()), new.num_computed_tokens) for new in output.scheduled_new_reqs
        ]
        cached = output.scheduled_cached_reqs
        names, resumed = cached.req_ids, getattr(cached, "resumed_req_ids", NONE)
        for row, own in enumerate(cached.new_block_ids):
            if own and names[row] in resumed:
                granted.append((names[row], _kept(own), cached.num_computed_tokens[row]))
            elif own:
                granted.append((names[row], own, None))
        if granted:
            self._events.append((GRANTED, granted))
        return granted

    def moved(self, kind: str, group: Group, *facts: Any) -> None:
        """Slots of a group were copied (from, to), zeroed (which) or loaded (request, which); tensors as they are."""
        self._events.append((kind, group.number, group.block_size, *facts))

    def ran(
        self,
        step: tuple[int, tuple[str, int], Sequence[str], NDArray[np.integer[Any]], int],
        lengths: NDArray[np.int64],
        grown: int,
    ) -> None:
        """A forward was shown; what happened before it belongs to it."""
        events, self._events = (self._events, []) if self._events else (NONE, self._events)
        self._fold()
        self._runs.append((RecentStep(*step, lengths, grown, events), 0))

    def goes_on(self, number: int) -> None:
        """The step that ran last comes once more, as this one; what happened before it belongs to it."""
        self._times += 1
        if self._events:
            self._own[number], self._events = self._events, []
            if len(self._own) > self._most:
                del self._own[next(iter(self._own))]

    def _fold(self) -> None:
        """The step that ran last came once more so often: every row by one entry, without anything new."""
        times, self._times = self._times, 0
        if times and self._runs:  # a ring of no steps keeps none
            step, before = self._runs[-1]
            self._runs[-1] = step, before + times

    @property
    def steps(self) -> list[RecentStep]:
        """The last ones, oldest first."""
        self._fold()
        every = [self._again(step, n) for step, times in self._runs for n in range(times + 1)]
        return every[-self._most :]

    def _again(self, step: RecentStep, n: int) -> RecentStep:
        number = step.number + n
        own = step.events if not n else self._own.get(number, NONE)
        return step._replace(number=number, grown=step.grown + n, events=own)

    def clear(self) -> None:
        self._runs.clear()
        self._own, self._times = {}, 0
        self._events, self._told = [], (0, [])

    # when somebody asks

    def number_of(self, request: str) -> int | None:
        """The row that this request had last; None where another has had it since, or nobody knows."""
        for step in reversed(self.steps):
            if request in step.requests:
                number = int(step.numbers[list(step.requests).index(request)])
                return number if self._last_of(number) == request else None
        return None

    def _last_of(self, number: int) -> str | None:
        for step in reversed(self.steps):
            where = np.flatnonzero(step.numbers == number)
            if len(where):
                return step.requests[int(where[0])]
        return None

    def told(self) -> list[dict[str, Any]]:
        """Every step as plain JSON, oldest first; blocks are those of tables."""
        steps = self.steps
        last = steps[-1].number if steps else 0
        if self._told[0] != last:
            self._told = last, [self._told_of(step) for step in steps]
        return self._told[1]

    def _told_of(self, step: RecentStep) -> dict[str, Any]:
        return {
            "step": step.number,
            "site": list(step.site),
            "tokens": step.num_tokens,
            "rows": [list(row) for row in step.rows],
            "events": [told for event in step.events for told in _told(event, self._granted)],
        }

    def _granted(self, granted: Sequence[Sequence[int]]) -> list[list[int]]:
        own = granted if self.groups is None else [granted[group] for group in self.groups]
        return [self._blocks(group, blocks) for group, blocks in enumerate(own)]

    def _blocks(self, group: int, blocks: Sequence[int]) -> list[int]:
        ratio = self.ratios[group] if group < len(self.ratios) else 1
        return [block * ratio + part for block in blocks for part in range(ratio)]


def _kept(blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """All blocks of a request, whose lists the engine goes on using."""
    return tuple(map(tuple, blocks))


def _told(event: tuple[Any, ...], blocks_of: Callable[[Sequence[Sequence[int]]], list[list[int]]]) -> list[list[Any]]:
    """An event as plain JSON; of what a step grants, one for each request."""
    kind, *facts = event
    if kind == GRANTED:
        return [[kind, request, blocks_of(granted), length] for request, granted, length in facts[0]]
    if kind in (ENDED, PREEMPTED):
        return [[kind, *facts]]
    group, size, *moved = facts
    slots = [fact // size for fact in moved if isinstance(fact, Tensor)]
    blocks = torch.stack(slots).unique_consecutive(dim=1).tolist()  # pairs, where they were copied
    return [[kind, group, *(fact for fact in moved if not isinstance(fact, Tensor)), *blocks]]
