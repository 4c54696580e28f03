"""Readback: what captured substeps found and how much of them ran, read on the host after a step's synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.calls.entries import Entries
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.captured.kernel_launches import PLANNED, READ, is_later
from kvcanary.captured.substep import HEADER_PART, ROW_STARTS, VIOLATIONS, CapturedSubstep
from kvcanary.checks.rows import grant_codes
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.records.mailbox import Message
from kvcanary.records.state import PoolState
from kvcanary_kernels.judge.count import ENTRY, ROW, SLOT, STEP
from kvcanary_kernels.record.layout import CODE_BITS, MASK_32, signed
from kvcanary_kernels.record.table import entry_at

MOST_ROWS = 16  # of a forward in which something fired
VIOLATIONS_PER_CHECK = 64  # of each side of a forward; the others are counted
CHUNK = 1 << 16  # codes read together, until every check has its violations
NOWHERE = -1
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


@dataclass(frozen=True, slots=True)
class CoverageGap:
    """H1: since it was read back last a forward covered other numbers than the host planned; none of them is a launch.

    Entries are those written, reads those that rows read.
    """

    pool: str
    site: tuple[str, int]
    bucket: int
    planned_rows: int
    run_rows: int
    planned_entries: int
    run_entries: int
    planned_reads: int
    run_reads: int

    @property
    def code(self) -> str:
        return "H1"


class ReadRow(NamedTuple):
    """What a row named, as it lies on the device now: [n] slots from position 0 on, before what its forward writes."""

    pool: PoolState
    site: tuple[str, int]
    uid: int
    slots: tuple[int, ...]


@dataclass
class Readback:
    """What fired and what did not run since it was read back last.

    totals: entries by (code, pool, site), exact, also where `violations` holds only the first of them
    runs:   rows, entries written and entries read that have run
    rows:   in which a read fired, the first of each substep
    """

    violations: list[CapturedViolation] = field(default_factory=list)
    gaps: list[CoverageGap] = field(default_factory=list)
    totals: dict[tuple[str, str, tuple[str, int]], int] = field(default_factory=dict)
    runs: tuple[int, int, int] = (0, 0, 0)
    rows: list[ReadRow] = field(default_factory=list)


class Ran(NamedTuple):
    """A run of a substep that the host launched, of which the buffers may hold a later one by now.

    turn: in which it ran;  message: as `CapturedSubstep.written` told it
    """

    turn: int
    message: Message
    requests: Sequence[Request]

    @property
    def row_starts(self) -> NDArray[np.int64]:
        """[rows] where its rows began in the index array."""
        return self.message[ROW_STARTS]

    @property
    def row_violations(self) -> NDArray[np.int64]:
        """[rows] entries of its rows at which something fired."""
        return self.message[VIOLATIONS]

    @property
    def header(self) -> NDArray[np.int64]:
        """[HEADER]"""
        return self.message[HEADER_PART]


def read_violations(
    substep: CapturedSubstep, new_counts: Tensor, step: int, ran: Ran | None
) -> list[CapturedViolation]:
    """The violations of a step behind `new_counts` [2, 64]: from codes of the last forward, and from the first ones
    kept.

    A later forward of the same substep overwrites codes; the first finding of each check outlives it, and is one of
    `ran`; None: of the last run. Every row at which something fired is named by one of them.
    """
    is_last, violations = ran is None or ran.turn == substep.last_turn, list[CapturedViolation]()
    planned, read = (
        _planned_violations(substep, new_counts[PLANNED], step),
        _read_violations(substep, new_counts[READ], step),
    )
    for side, found in ((PLANNED, list(planned)), (READ, list(read))):
        wanted = {CODES_BY_BIT[bit] for bit in new_counts[side].nonzero().flatten().tolist()}
        if is_last:
            violations += found
            wanted -= {violation.code for violation in found}
        firsts = list(_first_violations(substep, side, wanted, step, ran)) if wanted else []
        violations += firsts
        if not is_last:
            reported = {(violation.code, violation.row, violation.entry, violation.place) for violation in firsts}
            others = [
                violation
                for violation in found
                if (violation.code, violation.row, violation.entry, violation.place) not in reported
            ]
            violations += [replace(violation, is_exact=False) for violation in others]
    substep.work.forget_firsts(step)
    return _with_all_rows(substep, violations, ran)


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
    uids = {
        violation.row: violation.uid
        for violation in violations
        if violation.code.startswith("R") and violation.row != NOWHERE
    }
    rows = read_rows(substep, list(uids)[:MOST_ROWS])
    return [row for row, uid in zip(rows, uids.values(), strict=False) if row.uid == uid]


def _with_all_rows(
    substep: CapturedSubstep, violations: list[CapturedViolation], ran: Ran | None
) -> list[CapturedViolation]:
    """The first of these violations speaks for the rows at which something fired and that none of them names."""
    row_violations = substep.work.planned.row_violations.cpu().numpy() if ran is None else ran.row_violations
    named = {violation.uid for violation in violations}
    uids = dict.fromkeys(_uid(substep, row, ran) for row in np.flatnonzero(row_violations).tolist())
    others = tuple(uid for uid in uids if uid not in named and uid != NOWHERE)
    return [replace(violations[0], others=others), *violations[1:]] if others and violations else violations


def _planned_violations(substep: CapturedSubstep, new_counts: Tensor, step: int) -> Iterator[CapturedViolation]:
    """Write codes of entries, then row codes."""
    if not new_counts.any():
        return
    forward, planned, entries = substep.forward, substep.work.planned, substep.forward.num_entries
    codes, asked = planned.codes.cpu(), planned.asked.cpu()
    bounds, live = forward.bounds.cpu(), int(planned.live_entries)
    for code, where in _first_places(codes, new_counts, torch.ones_like):
        for entry in where:
            if entry >= entries:
                yield _violation(substep, code, entry - entries, NOWHERE, NOWHERE, int(asked[entry]), step)
            else:
                row = int(torch.searchsorted(bounds, entry, right=True)) - 1 if entry < live else NOWHERE
                yield _violation(substep, code, row, entry, NOWHERE, int(asked[entry]), step)


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
        rows = order[torch.searchsorted(begins, torch.tensor(where, dtype=torch.int64), right=True) - 1]
        places = torch.tensor(where, dtype=torch.int64) - starts[rows]
        slots = _slots(substep, rows, places)
        for row, place, slot in zip(rows.tolist(), places.tolist(), slots.tolist(), strict=True):
            yield _violation(substep, code, row, NOWHERE, place, slot, step)


def _slots(substep: CapturedSubstep, rows: Tensor, places: Tensor) -> Tensor:
    """[n] int64 on the host: what indices name at these places of these rows, as it lies on the device now."""
    starts = substep.work.planned.starts
    return entry_at(substep.forward.indices, starts[rows.to(starts.device)] + places.to(starts.device)).cpu()


def _first_places(
    codes: Tensor, new_counts: Tensor, is_live: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, list[int]]]:
    """Each check that was counted, and the first live places in `codes` that have its bit."""
    found: dict[int, list[int]] = {bit: [] for bit in new_counts.nonzero().flatten().tolist()}
    for first in range(0, len(codes), CHUNK):
        wanted = [bit for bit, places in found.items() if len(places) < VIOLATIONS_PER_CHECK]
        part = codes[first : first + CHUNK]
        violation = (part & signed(sum(1 << bit for bit in wanted))).nonzero().flatten()
        violation = violation[is_live(violation + first).bool()]
        for bit in wanted if len(violation) else ():
            places = violation[(part[violation] >> bit & 1).bool()] + first
            found[bit] += places[: VIOLATIONS_PER_CHECK - len(found[bit])].tolist()
    for bit, where in found.items():
        yield CODES_BY_BIT[bit], where


def _first_violations(
    substep: CapturedSubstep, side: int, codes: set[str], step: int, ran: Ran | None
) -> Iterator[CapturedViolation]:
    forward = substep.forward
    for bit, first in enumerate(substep.work.firsts[side].tolist()):
        if CODES_BY_BIT.get(bit) in codes and first[STEP] >= 0 and not is_later(first[STEP], step):
            entry, row = first[ENTRY], first[ROW]
            place = NOWHERE
            if side == READ:
                starts = substep.work.planned.starts if ran is None else ran.row_starts
                place, entry = entry - int(starts[row]), NOWHERE
            elif entry >= forward.num_entries:
                entry = NOWHERE
            yield _violation(substep, CODES_BY_BIT[bit], row, entry, place, first[SLOT], first[STEP], ran)


def _violation(
    substep: CapturedSubstep, code: str, row: int, entry: int, place: int, slot: int, step: int, ran: Ran | None = None
) -> CapturedViolation:
    uid = _uid(substep, row, ran)
    return CapturedViolation(code, substep.pool.name, substep.site, step & MASK_32, row, entry, place, slot, uid)


def _uid(substep: CapturedSubstep, row: int, ran: Ran | None) -> int:
    if row == NOWHERE:
        return NOWHERE
    if ran is not None and row // substep.width < len(ran.requests):
        return ran.requests[row // substep.width].uid
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
