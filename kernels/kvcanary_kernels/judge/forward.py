"""ForwardPlan and Planned: what one forward reads and writes as kernels take it, and what `plan` derives of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary_kernels.record.arguments import expect_int64

NO_SLOT = -1
NO_PARENT = -2  # the parent is no earlier entry of the row: no chain to continue
ROOT = -1  # of a parent: the entry continues its row


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One forward as the engine and the host describe it, in tensors at fixed addresses; all int64.

    indices:     [nnz], slots: what attention reads
    row_starts, row_ends: [rows], half-open: where each row lies in `indices`, in position order; the last entries are
                 those that the row writes
    bounds:      [rows + 1], never falling from 0: entries [bounds[r], bounds[r + 1]) are written by row r
    slots, tokens, positions: [entries], the write plan
    parents:     [entries], tree parent as an entry of the forward, ROOT (-1) where an entry continues the row; None:
                 every row is a chain
    prefix_lens: [rows], entries of the row that are final; -1: not known, R10 and R6 are not judged
    truths:      [rows], chain value of the row's own tokens up to its prefix_len; None: R6 is not judged
    uids:        [rows], request of each row
    roots:       [rows], chain value that position 0 of each row continues; None: the pool's own
    lineage:     [rows], branch of the row's request, in the draft forward before, whose entry the row goes on from; of
                 rows that write one entry each. None: a row goes on from the entry before its own, whoever wrote it
    num_live:    [1], rows at and after it are padding
    ancestors:   entries of a row between its prefix and what it writes
    """

    indices: Tensor
    row_starts: Tensor
    row_ends: Tensor
    bounds: Tensor
    slots: Tensor
    tokens: Tensor
    positions: Tensor
    parents: Tensor | None
    prefix_lens: Tensor
    truths: Tensor | None
    uids: Tensor
    num_live: Tensor
    ancestors: int = 0
    roots: Tensor | None = None
    lineage: Tensor | None = None

    def __post_init__(self) -> None:
        rows, entries = self.num_rows, self.num_entries
        expect_int64(self.capacity, indices=self.indices)
        expect_int64(rows, row_starts=self.row_starts, row_ends=self.row_ends, prefix_lens=self.prefix_lens)
        expect_int64(rows, truths=self.truths, uids=self.uids, roots=self.roots, lineage=self.lineage)
        expect_int64(rows + 1, bounds=self.bounds)
        expect_int64(entries, slots=self.slots, tokens=self.tokens, positions=self.positions, parents=self.parents)
        expect_int64(1, num_live=self.num_live)

    @property
    def num_rows(self) -> int:
        return self.row_starts.numel()

    @property
    def num_entries(self) -> int:
        return self.slots.numel()

    @property
    def capacity(self) -> int:
        """Entries that all rows together may read."""
        return self.indices.numel()


@dataclass(frozen=True, eq=False)
class Planned:
    """What `plan` derives, int64; by row r and by entry e of the forward. Padding rows have length 0.

    live_entries: [1]
    starts:       [rows], where the row begins, 0 for rows that are not judged
    read_lengths: [rows], entries of the row that earlier forwards wrote
    row_lengths:  [rows], with those that this forward writes
    seeds:        [rows], chain value that the row's own entries continue: with a lineage its parent's, else that of the
                  entry that it reads before them
    entry_seeds:  [entries], the same by entry
    parents:      [entries], those of the forward, NO_PARENT where one is no earlier entry of the row
    safe_slots:   [entries], NO_SLOT where the write is refused: everything but W5 refuses
    places:       [entries], where in `indices` the row should read what the entry writes
    own_lengths:  [entries], 1 where there is such a place
    ancestors:    [rows, n], slots that the row names between its prefix and what it writes; NO_SLOT where it does not
    row_violations: [rows], zero, for count to add to
    generations, requests, sites: [entries], for the seal
    codes:        [entries + rows], write codes of every entry, then row codes. Padding is judged too: W9
    asked:        [entries + rows], slots as the plan named them, then for each padding row one that is not null
    counted_starts, counted_lengths, counted_rows: [2 * rows + 1] segments of `codes` for count: each row's entries,
                  each row, and the padding entries, which are no row's
    """

    live_entries: Tensor
    starts: Tensor
    read_lengths: Tensor
    row_lengths: Tensor
    seeds: Tensor
    entry_seeds: Tensor
    parents: Tensor
    safe_slots: Tensor
    places: Tensor
    own_lengths: Tensor
    ancestors: Tensor
    row_violations: Tensor
    generations: Tensor
    requests: Tensor
    sites: Tensor
    codes: Tensor
    asked: Tensor
    counted_starts: Tensor
    counted_lengths: Tensor
    counted_rows: Tensor


Room = Callable[[Tensor | int], Tensor]


def new_planned(forward: ForwardPlan, room: Room | None = None) -> Planned:
    """Room for what `plan` derives of this forward.

    room: where: gives a tensor of so many zeros, or of these numbers of the host, [n] int64; None: each in memory of
          its own
    """
    rows, entries = forward.num_rows, forward.num_entries
    new = room_on(forward.slots.device) if room is None else room
    row, one = torch.arange(rows), torch.ones(1, dtype=torch.int64)
    none = torch.zeros_like(row)
    by_row = "starts", "read_lengths", "row_lengths", "seeds", "row_violations"
    by_entry = "entry_seeds", "parents", "safe_slots", "places", "own_lengths", "generations", "requests", "sites"
    return Planned(
        live_entries=new(1),
        ancestors=new(rows * forward.ancestors).view(rows, forward.ancestors),
        codes=new(entries + rows),
        asked=new(entries + rows),
        counted_starts=new(torch.cat((none, entries + row, one - 1))),
        counted_lengths=new(torch.cat((none, none + 1, one - 1))),
        counted_rows=new(torch.cat((row, row, -one))),
        **{name: new(rows) for name in by_row},
        **{name: new(entries) for name in by_entry},
    )


def room_on(device: torch.device) -> Room:
    """Memory of its own for every tensor."""

    def new(wanted: Tensor | int) -> Tensor:
        if isinstance(wanted, int):
            return torch.zeros(wanted, dtype=torch.int64, device=device)
        return wanted.to(device)

    return new
