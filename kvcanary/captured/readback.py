"""Readback: what captured substeps found and how much of them ran, read on the host after a step's synchronisation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.entries import Entries
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.captured.kernel_launches import PLANNED, READ, is_later
from kvcanary.captured.launch_group import Launched
from kvcanary.captured.substep import ROW_STARTS, VIOLATIONS, CapturedSubstep
from kvcanary.checks.rows import grant_codes
from kvcanary.ledger.ledger import Ledger
from kvcanary.records.state import PoolState
from kvcanary_kernels.judge.count import ENTRY, ROW, SLOT, STEP
from kvcanary_kernels.judge.settle import NUM_RUNS
from kvcanary_kernels.record.layout import CODE_BITS, MASK_32
from kvcanary_kernels.record.table import entry_at

MOST_ROWS = 16  # of a forward in which something fired
VIOLATIONS_PER_CHECK = 64  # of each side of a forward; the others are counted
NOWHERE = -1
_where = attrgetter("code", "row", "entry", "place")
CODES_BY_BIT = {bits.bit_length() - 1: code for code, bits in CODE_BITS.items()}


@dataclass(frozen=True, slots=True)
class CapturedViolation:
    """One check that fired at one place of a forward.

    row:      of the forward; NOWHERE (-1) for padding entries of the write plan
    entry:    of the write plan; NOWHERE for what was only read, and for whole rows
    place:    in the row, which is the position that the row gives the entry; NOWHERE for entries and whole rows
    slot:     as the plan or the index array named it, in the pool or not
    uid:      of the row's request; NOWHERE for padding
    step:     low 32 bits of the engine step
    is_exact: the place is that of this step; else a later run's, in which the same check fired: the device keeps the
              place of each check's first finding until the host has collected it, and none of the next step's before
    others:   uids of more requests in whose rows something fired, at places that nobody tells
    """

    code: str
    pool: str
    site: tuple[str, int]
    step: int
    row: int
    entry: int
    place: int
    slot: int
    uid: int = NOWHERE
    is_exact: bool = True
    others: tuple[int, ...] = ()


class Amounts(NamedTuple):
    """Of forwards: rows, entries that they write, and entries that their rows read; as `settle` counts its runs."""

    rows: int
    entries: int
    reads: int


class CoverageGap(NamedTuple):
    """H1: since it was read back last a forward covered others than the host planned; none of them is a launch."""

    pool: str
    site: tuple[str, int]
    bucket: int
    planned: Amounts
    run: Amounts


class ReadRow(NamedTuple):
    """What a row named, as it lies on the device now: [n] slots from position 0 on, before what its forward writes."""

    pool: PoolState
    site: tuple[str, int]
    uid: int
    slots: tuple[int, ...]


@dataclass
class Readback:
    """What fired and what did not run since it was read back last.

    runs: `Amounts` that have run
    rows: in which a read fired, the first of each substep
    """

    violations: list[CapturedViolation] = field(default_factory=list)
    gaps: list[CoverageGap] = field(default_factory=list)
    runs: array[int] = field(default_factory=lambda: array("q", bytes(8 * NUM_RUNS)))
    rows: list[ReadRow] = field(default_factory=list)


def read_violations(
    substep: CapturedSubstep, new_counts: Tensor, step: int, run: Launched | None
) -> list[CapturedViolation]:
    """The violations of a step behind `new_counts` [2, 64]: from codes of the last forward, and from the first ones
    kept.

    A later forward of the same substep overwrites codes; the first finding of each check outlives it, and is one of
    `run`; None: of the last run. Every row at which something fired is named by one of them.
    """
    is_last, violations = run is None or run.turn == substep.last_turn, list[CapturedViolation]()
    planned = _planned_violations(substep, new_counts[PLANNED], step)
    read = _read_violations(substep, new_counts[READ], step)
    for side, found in ((PLANNED, list(planned)), (READ, list(read))):
        wanted = {CODES_BY_BIT[bit] for bit in new_counts[side].nonzero().flatten().tolist()}
        if is_last:
            violations += found
            wanted -= {violation.code for violation in found}
        firsts = list(_first_violations(substep, side, wanted, step, run)) if wanted else []
        violations += firsts
        if not is_last:
            reported = set(map(_where, firsts))
            violations += [replace(one, is_exact=False) for one in found if _where(one) not in reported]
    substep.work.forget_firsts(step)
    return _with_all_rows(substep, violations, run)


def read_rows(substep: CapturedSubstep, numbers: Iterable[int]) -> list[ReadRow]:
    """Rows of the last run of a forward, by number."""
    forward, planned = substep.forward, substep.work.planned
    lengths, uids, rows = planned.read_lengths.tolist(), forward.uids.tolist(), list[ReadRow]()
    for row in numbers:
        places = torch.arange(max(lengths[row] - forward.ancestors, 0))
        slots = _slots(substep, torch.full_like(places, row), places)
        rows.append(ReadRow(substep.pool, substep.site, uids[row], tuple(slots.tolist())))
    return rows


def rows_of(substep: CapturedSubstep, violations: Sequence[CapturedViolation]) -> list[ReadRow]:
    """Those of violations that a read has made, as long as their requests are still in them."""
    uids = {one.row: one.uid for one in violations if one.code.startswith("R") and one.row != NOWHERE}
    rows = read_rows(substep, list(uids)[:MOST_ROWS])
    return [row for row, uid in zip(rows, uids.values(), strict=False) if row.uid == uid]


def _with_all_rows(
    substep: CapturedSubstep, violations: list[CapturedViolation], run: Launched | None
) -> list[CapturedViolation]:
    """The first of these violations speaks for the rows at which something fired and that none of them names."""
    row_violations = substep.work.planned.row_violations.cpu().numpy() if run is None else run.message[VIOLATIONS]
    named = {violation.uid for violation in violations}
    uids = dict.fromkeys(_uid(substep, row, run) for row in np.flatnonzero(row_violations).tolist())
    others = tuple(uid for uid in uids if uid not in named and uid != NOWHERE)
    return [replace(violations[0], others=others), *violations[1:]] if others and violations else violations


def _planned_violations(substep: CapturedSubstep, new_counts: Tensor, step: int) -> Iterator[CapturedViolation]:
    """Write codes of entries, then row codes."""
    if not new_counts.any():
        return
    forward, planned, entries = substep.forward, substep.work.planned, substep.forward.num_entries
    asked, bounds, live = planned.asked.cpu(), forward.bounds.cpu(), int(planned.live_entries)
    for code, where in _first_places(planned.codes.cpu(), new_counts, torch.ones_like):
        for number in where.tolist():
            row, entry = number - entries, NOWHERE
            if number < entries:
                row = int(torch.searchsorted(bounds, number, right=True)) - 1 if number < live else NOWHERE
                entry = number
            yield _violation(substep, code, row, entry, NOWHERE, int(asked[number]), step)


def _read_violations(substep: CapturedSubstep, new_counts: Tensor, step: int) -> Iterator[CapturedViolation]:
    """Read codes of live rows."""
    if not new_counts.any():
        return
    planned = substep.work.planned
    starts, lengths = planned.starts.cpu(), planned.row_lengths.cpu()
    order = starts.argsort()
    order = order[lengths[order] > 0]
    if not len(order):  # the last forward had padding only
        return
    begins, ends = starts[order], (starts + lengths)[order]

    def is_live(where: Tensor) -> Tensor:
        nth = torch.searchsorted(begins, where, right=True) - 1
        return (nth >= 0) & (where < ends[nth])

    for code, where in _first_places(substep.work.codes.cpu(), new_counts, is_live):
        rows = order[torch.searchsorted(begins, where, right=True) - 1]
        places = where - starts[rows]
        slots = _slots(substep, rows, places)
        for row, place, slot in zip(rows.tolist(), places.tolist(), slots.tolist(), strict=True):
            yield _violation(substep, code, row, NOWHERE, place, slot, step)


def _slots(substep: CapturedSubstep, rows: Tensor, places: Tensor) -> Tensor:
    """[n] int64 on the host: what indices name at these places of these rows, as it lies on the device now."""
    starts = substep.work.planned.starts
    return entry_at(substep.forward.indices, starts[rows.to(starts.device)] + places.to(starts.device)).cpu()


def _first_places(
    codes: Tensor, new_counts: Tensor, is_live: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Each check that was counted, and the first live places in `codes` that have its bit."""
    for bit in new_counts.nonzero().flatten().tolist():
        where = (codes >> bit & 1).nonzero().flatten()
        yield CODES_BY_BIT[bit], where[is_live(where).bool()][:VIOLATIONS_PER_CHECK]


def _first_violations(
    substep: CapturedSubstep, side: int, codes: set[str], step: int, run: Launched | None
) -> Iterator[CapturedViolation]:
    forward = substep.forward
    for bit, first in enumerate(substep.work.firsts[side].tolist()):
        if CODES_BY_BIT.get(bit) in codes and first[STEP] >= 0 and not is_later(first[STEP], step):
            entry, row = first[ENTRY], first[ROW]
            place = NOWHERE
            if side == READ:
                starts = substep.work.planned.starts if run is None else run.message[ROW_STARTS]
                place, entry = entry - int(starts[row]), NOWHERE
            elif entry >= forward.num_entries:
                entry = NOWHERE
            yield _violation(substep, CODES_BY_BIT[bit], row, entry, place, first[SLOT], first[STEP], run)


def _violation(
    substep: CapturedSubstep,
    code: str,
    row: int,
    entry: int,
    place: int,
    slot: int,
    step: int,
    run: Launched | None = None,
) -> CapturedViolation:
    uid = _uid(substep, row, run)
    return CapturedViolation(code, substep.pool.name, substep.site, step & MASK_32, row, entry, place, slot, uid)


def _uid(substep: CapturedSubstep, row: int, run: Launched | None) -> int:
    if row == NOWHERE:
        return NOWHERE
    if run is not None and row // substep.width < len(run.batch.requests):
        return run.batch.requests[row // substep.width].uid
    return int(substep.forward.uids[row])


def judge_read_rows(ledger: Ledger, rows: Iterable[ReadRow], step: int) -> list[ViolationBatch]:
    """R7 and R8 of captured forwards in which something else fired, or whose requests lack pages."""
    violations = []
    for row in dict.fromkeys(rows):
        request = ledger.requests.get(ledger.name(row.uid) or "")
        if request is None or request.uid != row.uid:
            continue
        slots, positions = np.array(row.slots, np.int64), np.arange(len(row.slots))
        codes = grant_codes(ledger, request, 0, slots)
        entries = Entries(slots, positions, np.zeros_like(positions), [request.request_id])
        for code in ("R7", "R8"):
            which = np.flatnonzero(codes == CODE_BITS[code])
            if len(which):
                violations.append(entries.fired(code, row.pool, row.site, step, which))
    return violations
