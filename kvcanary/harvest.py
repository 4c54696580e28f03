"""Harvest: what static substeps found and how much of them ran, read on the host after a step's synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcanary.launches import PLANNED, READ
from kvcanary.static import StaticSubstep
from kvcanary_kernels.count import ENTRY, NUM_BITS, ROW, SLOT, STEP, UNSET
from kvcanary_kernels.record import CODE_BITS, MASK_32
from kvcanary_kernels.table import PageTable, segment_entries, slot_at

HITS_PER_CHECK = 64  # of each side of a forward; the others are counted
NOWHERE = -1
CODES_BY_BIT = {bits.bit_length() - 1: code for code, bits in CODE_BITS.items()}


@dataclass(frozen=True, slots=True)
class StaticHit:
    """One check that fired at one place of a forward.

    row:      of the forward; NOWHERE (-1) for padding entries of the write plan
    entry:    of the write plan; NOWHERE for what was only read, and for whole rows
    place:    in the row, which is the position that the row gives the entry; NOWHERE for entries and whole rows
    slot:     as the plan or the index array named it, in the pool or not
    step:     low 32 bits of the engine step
    """

    code: str
    pool: str
    site: tuple[str, int]
    step: int
    row: int
    entry: int
    place: int
    slot: int


@dataclass(frozen=True, slots=True)
class CoverageGap:
    """H1: since the last harvest a forward covered other numbers than the host planned; none of them is a launch.

    Entries are those written, reads those that rows read (as planned where the host left it to the device).
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


@dataclass
class Harvest:
    """What fired and what did not run since the last harvest.

    totals: entries by (code, pool, site), exact, also where `hits` holds only the first of them
    """

    hits: list[StaticHit] = field(default_factory=list)
    gaps: list[CoverageGap] = field(default_factory=list)
    totals: dict[tuple[str, str, tuple[str, int]], int] = field(default_factory=dict)


def read_hits(substep: StaticSubstep, new_counts: Tensor) -> Iterator[StaticHit]:
    """The hits behind `new_counts` [2, 64]: from the codes of the last forward, else from the first finding kept.

    A later forward of the same substep overwrites codes; the first finding of each check outlives it.
    """
    planned, read = _planned_hits(substep, new_counts[PLANNED]), _read_hits(substep, new_counts[READ])
    for side, hits in ((PLANNED, planned), (READ, read)):
        found = list(hits)
        yield from found
        unseen = {CODES_BY_BIT[bit] for bit in new_counts[side].nonzero().flatten().tolist()}
        unseen -= {hit.code for hit in found}
        if unseen:
            yield from _first_hits(substep, side, unseen)
        substep.work.firsts[side].copy_(torch.tensor(UNSET, device=substep.step.device).expand(NUM_BITS, 4))


def _planned_hits(substep: StaticSubstep, new_counts: Tensor) -> Iterator[StaticHit]:
    """Write codes of entries, then row codes."""
    if not new_counts.any():
        return
    forward, planned, entries = substep.forward, substep.work.planned, substep.forward.num_entries
    codes, asked = planned.codes.cpu(), planned.asked.cpu()
    bounds, live = forward.bounds.cpu(), int(planned.live_entries)
    for code, where in _fired(codes, new_counts):
        for entry in where.tolist():
            if entry >= entries:
                yield _hit(substep, code, entry - entries, NOWHERE, NOWHERE, int(asked[entry]))
            else:
                row = int(torch.searchsorted(bounds, entry, right=True)) - 1 if entry < live else NOWHERE
                yield _hit(substep, code, row, entry, NOWHERE, int(asked[entry]))


def _read_hits(substep: StaticSubstep, new_counts: Tensor) -> Iterator[StaticHit]:
    """Read codes of live rows."""
    if not new_counts.any():
        return
    forward, planned = substep.forward, substep.work.planned
    live = min(max(int(forward.num_live), 0), forward.num_rows)
    starts, lengths = planned.starts[:live].cpu(), planned.row_lengths[:live].cpu()
    table = forward.table
    code_starts = starts if table.code_starts is None else table.code_starts[:live].cpu()
    rows = torch.arange(live).repeat_interleave(lengths)
    code_places, places, nth = segment_entries(lengths, rows.numel(), code_starts, starts, torch.zeros_like(starts))
    codes, pages = substep.work.codes.cpu()[code_places], PageTable(table.pages.cpu(), table.page_size)
    for code, where in _fired(codes, new_counts):
        table_rows = None if table.rows is None else table.rows.cpu()[rows[where]]
        slots = slot_at(pages, table_rows, places[where])
        for row, place, slot in zip(rows[where].tolist(), nth[where].tolist(), slots.tolist(), strict=True):
            yield _hit(substep, code, row, NOWHERE, place, slot)


def _fired(codes: Tensor, new_counts: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each check that was counted, and the first places in `codes` that have its bit."""
    hit = codes.nonzero().flatten()
    for bit in new_counts.nonzero().flatten().tolist():
        yield CODES_BY_BIT[bit], hit[(codes[hit] >> bit & 1).bool()][:HITS_PER_CHECK]


def _first_hits(substep: StaticSubstep, side: int, codes: set[str]) -> Iterator[StaticHit]:
    forward = substep.forward
    for bit, first in enumerate(substep.work.firsts[side].tolist()):
        if CODES_BY_BIT.get(bit) in codes and first[STEP] >= 0:
            entry, row = first[ENTRY], first[ROW]
            place = NOWHERE
            if side == READ:
                place, entry = entry - int(_code_start(substep, row)), NOWHERE
            elif entry >= forward.num_entries:
                entry = NOWHERE
            yield _hit(substep, CODES_BY_BIT[bit], row, entry, place, first[SLOT], first[STEP])


def _code_start(substep: StaticSubstep, row: int) -> Tensor:
    """Where the codes of a row begin, as the last forward had it."""
    table = substep.forward.table
    return (substep.work.planned.starts if table.code_starts is None else table.code_starts)[row]


def _hit(
    substep: StaticSubstep, code: str, row: int, entry: int, place: int, slot: int, step: int | None = None
) -> StaticHit:
    when = int(substep.step) & MASK_32 if step is None else step
    return StaticHit(code, substep.pool.name, substep.site, when, row, entry, place, slot)
