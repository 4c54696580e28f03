"""Checkpoint: what is true of requests, pages and records at one moment, copied, so that events can follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcanary_kernels.record.layout import LAYERS_HIGH, LAYERS_LOW

if TYPE_CHECKING:
    from kvcanary.captured.step import CapturedStep
    from kvcanary.ledger.ledger import Ledger, Request
    from kvcanary.ledger.request_state import UncollectedStep
    from kvcanary.records.record_store import RecordStore
    from kvcanary.records.state import CanaryState, PoolState
    from kvcanary.scrub.poison import Poisoner
    from kvcanary.scrub.prefix_cache import PrefixScrubber
    from kvcanary.scrub.scrubber import Scrubber
    from kvcanary.transfers.async_tracker import AsyncTracker

Array = NDArray[Any]
RECORD_BYTES = 32  # that are kept of a record
PAGE_ARRAYS = ("generations", "states", "owners", "refcounts", "published", "writers", "holder_sums")
#: What is true of a request and goes into a dump, and back into a ledger, as it is.
REQUEST_FACTS = ("committed_len", "final_pages", "commit_step", "released", "owned_len", "is_damaged")


class Checks(Protocol):
    """Of the checks of a step, what a recording and its checkpoints read."""

    step: int
    captured: CapturedStep | None
    record_store: RecordStore
    scrubber: Scrubber
    cached: PrefixScrubber


class ManagerState(NamedTuple):
    """Where the truth of a manager is kept."""

    state: CanaryState
    ledger: Ledger
    checks: Checks
    async_tracker: AsyncTracker
    poisoner: Poisoner
    mapped: dict[str, Poisoner]
    undeclared: dict[str, bool]

    def poisoners(self) -> dict[str | None, Poisoner]:
        """By group behind a slot map; None: of all pools without one."""
        own: dict[str | None, Poisoner] = {None: self.poisoner}
        return own | self.mapped

    def poisoner_of(self, pool: PoolState) -> Poisoner:
        return self.poisoner if pool.view.slot_map is None else self.mapped[pool.view.group]


class Poisoned(NamedTuple):
    """The free pages of one poisoner. `is_untold`: nobody has declared pages of its group yet."""

    group: str | None
    waiting: tuple[int, ...]
    poisoned: tuple[int, ...]
    credit: int
    is_untold: bool


@dataclass(frozen=True, eq=False)
class RequestState:
    """One live request; `tokens`: those that were known then, and `steps`, in which each became so, where they lie.

    roots: by pool, what stands for role, salt and adapter; reads: by pool, [n, 3] int64 ranges of `ReadQueue.numbers`
    facts: REQUEST_FACTS, and by pool `row_lens` and `judged`: length, step, whether the epoch is the record store's
    """

    request_id: str
    tokens: Array
    steps: Array
    num_tokens: int
    roots: tuple[int, ...]
    pages: tuple[int, ...]
    reads: tuple[Array, ...]
    uncollected: tuple[UncollectedStep, ...]
    facts: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All of it, behind the check of a step, when nothing waits to be judged.

    pages:    the arrays of `Pages` by name, PAGE_ARRAYS
    records:  [slots of all pools, 4] uint64, token and position, chain, request and generation, step and site; None
              where they would take too many bytes
    partial:  [n, 3] uint64: rows of records that not every layer has written, with both words of their bitmaps
    judged:   [slots of all pools] bool, as `RecordStore.judged`
    poisoners: one a group;  quarantine: (page, step), oldest first
    buffers:  host buffers with the generations that they are in
    budgets:  (uid, pool, credit) of the rolling check;  read_at: by page, when a cached page was read
    """

    step: int
    requests: tuple[RequestState, ...]
    pages: dict[str, Array]
    records: Array | None
    partial: Array
    judged: Array
    quarantine: tuple[tuple[int, int], ...]
    poisoners: tuple[Poisoned, ...]
    buffers: tuple[tuple[str, int], ...]
    budgets: tuple[tuple[int, int, float], ...]
    hurried: tuple[str, ...]
    read_at: Array

    @property
    def num_bytes(self) -> int:
        arrays = [*self.pages.values(), self.partial, self.judged, self.read_at]
        if self.records is not None:
            arrays.append(self.records)
        arrays += [ranges for request in self.requests for ranges in request.reads]
        lists = sum(len(request.pages) + 64 for request in self.requests)
        return sum(array.nbytes for array in arrays) + 8 * lists


def room_for_records(manager_state: ManagerState, most_bytes: int) -> Array | None:
    """Memory for the records of one checkpoint, every page of it touched; None where they take more bytes.

    To find it takes a host ten times as long as to copy records into it (280,000 of them: 12 ms and 1.2).
    """
    count = len(manager_state.checks.record_store.memory)
    return np.full((count, RECORD_BYTES // 8), 0, np.int64) if count * RECORD_BYTES <= most_bytes else None


def take_checkpoint(manager_state: ManagerState, step: int, room: Array | None) -> Checkpoint:
    """Copy it; nothing waits to be judged. `room`: `room_for_records`, which nobody else uses from now on."""
    ledger, checks = manager_state.ledger, manager_state.checks
    partial = _copy_records(manager_state, room)
    table = checks.record_store.table
    return Checkpoint(
        step=step,
        requests=tuple(_request(request, checks.record_store.epoch) for request in ledger.requests.values()),
        pages={name: getattr(ledger.pages, name).copy() for name in PAGE_ARRAYS},
        records=None if room is None else room.view(np.uint64),
        partial=np.column_stack([partial.astype(np.uint64), table[partial][:, [LAYERS_LOW, LAYERS_HIGH]]]),
        judged=checks.record_store.judged.copy(),
        quarantine=tuple(ledger.quarantined),
        poisoners=tuple(
            Poisoned(
                group,
                tuple(poisoner.waiting),
                tuple(poisoner.poisoned),
                poisoner.credit,
                manager_state.undeclared.get(group or "", False),
            )
            for group, poisoner in manager_state.poisoners().items()
        ),
        buffers=tuple(manager_state.async_tracker.buffers.items()),
        budgets=tuple((uid, pool, credit) for (uid, pool), credit in checks.scrubber.credit.items()),
        hurried=tuple(checks.scrubber.hurried),
        read_at=checks.cached.read_at.copy(),
    )


def _copy_records(manager_state: ManagerState, room: Array | None) -> Array:
    """`records` of a checkpoint into this room; [n] int64 rows that some layers have written and others not."""
    memory, pools = manager_state.checks.record_store.memory, manager_state.state.pools
    records = np.empty((0, RECORD_BYTES // 8), np.int64) if room is None else room
    partial, num_partial = np.empty(len(memory), np.int64), 0
    for pool in pools:
        end, rest = pool.base + pool.view.num_slots, partial[num_partial:]
        num_partial += pool.loops.copy_records(memory, pool.base, end, *pool.all_layers, records, rest)
    return partial[:num_partial].copy()


def _request(request: Request, epoch: int) -> RequestState:
    return RequestState(
        request.request_id,
        request.tokens,
        request.steps,
        len(request.tokens),
        tuple(map(request.root, range(len(request.ahead)))),
        tuple(request.pages),
        tuple(queue.numbers() for queue in request.reads),
        tuple(request.uncollected),
        {
            **{name: getattr(request, name) for name in REQUEST_FACTS},
            "row_lens": request.row_lens.tolist(),
            "judged": [(judged.length, judged.step, judged.epoch == epoch) for judged in request.judged],
        },
    )
