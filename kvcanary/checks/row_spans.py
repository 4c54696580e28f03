"""Segments: stretches of the rows that forwards have read; which rows are as they should be, and which are suspects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcanary.calls.entries import Entries, last_judged, named
from kvcanary.calls.forward import Forward, Ints
from kvcanary.ledger.ledger import Request
from kvcanary.pools.slot_maps import SLOT_BYTES
from kvcanary.records.state import PoolState
from kvcanary_kernels.judge.verify import NO_PREDECESSOR, ROOT

Path = tuple[int, int, int, list[int]]  # request, prefix, end position, slots behind the prefix


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive entries of one row.

    start, length:  where in the indices of the forward
    first_position: of its first entry
    predecessor:    slot that its first entry continues, ROOT: the request's tokens before it, or NO_PREDECESSOR
    first_written:  of the write plan, the entry that the first one should be, where the row should read what the
                    forward itself writes; else -1
    """

    forward: Forward
    row: int
    start: int
    length: int
    first_position: int = 0
    predecessor: int = ROOT
    first_written: int = -1

    @property
    def request(self) -> Request:
        return self.forward.request_of(self.row)

    @property
    def slots(self) -> Ints:
        return self.forward.ids[self.start : self.start + self.length]

    @property
    def names(self) -> Ints:
        """The slots as the plan names them."""
        return self.forward.names[self.start : self.start + self.length]

    @property
    def end_position(self) -> int:
        return self.first_position + self.length

    @property
    def written(self) -> slice:
        """Of the write plan, the entries that these should be."""
        return slice(self.first_written, self.first_written + self.length)

    @property
    def judged_positions(self) -> Ints:
        """Where to begin to judge: at the first entry, or at each that the forward writes."""
        return self.positions if self.first_written >= 0 else np.array([self.first_position])

    @property
    def positions(self) -> Ints:
        if self.first_written >= 0:
            return self.forward.planned.positions[self.written]
        return np.arange(self.first_position, self.first_position + self.length)


def sort_rows(forwards: Sequence[Forward]) -> tuple[list[Segment], list[Segment]]:
    """Compare every row with what it should be: its request's grants, a path of the draft tree, its own writes.

    The longest row of each request and first position, and what does not name its grants. Rows that are too short are
    in neither list.
    """
    longest: dict[tuple[int, int], Segment] = {}
    suspects: list[Segment] = []
    paths: dict[int, Path] = {}  # by slot of a draft node, with itself
    for forward in forwards:
        raw, ids, bounds, slots = forward.raw, forward.ids, forward.bounds, forward.write_slots
        draft, first, width = forward.kind == "draft", 0, forward.width
        starts, skipped, begins, short = forward.starts, forward.skipped, forward.begins, forward.short_rows
        for number, (request, length) in enumerate(zip(forward.requests, forward.prefixes, strict=True)):
            granted, uid = request.row, request.uid
            if len(granted) > length * SLOT_BYTES:
                granted = granted[: length * SLOT_BYTES]
            whole = len(granted) == length * SLOT_BYTES
            for row in range(number * width, (number + 1) * width):
                begin, end, written = starts[row] + skipped[row], bounds[row + 1], forward.written[row]
                if row in short:  # R10: nobody can say which of its entries are missing
                    first += written
                    continue
                start, own, count = bounds[row] + skipped[row], end - written, max(0, length - begin)
                middle = start + count
                known = longest.get((uid, begin))
                visible = granted[begin * SLOT_BYTES :] if begin else granted
                if not whole or not raw.startswith(visible, start * SLOT_BYTES):
                    suspects.append(Segment(forward, row, start, count, begin))
                elif count and (known is None or known.length < count):
                    longest[uid, begin] = Segment(forward, row, start, count, begin)
                tail = ids[middle:end].tolist()
                if middle < own:
                    ancestors = tail[: own - middle]
                    path = uid, length, begins[row], ancestors
                    if not _is_tail(path, paths.get(ancestors[-1])):
                        suspects.append(_between(forward, row, middle, own - middle, max(length, begin)))
                if tail[own - middle :] != slots[first : first + written]:
                    suspects.append(_astray(forward, row, own, first, written))
                if draft and written == 1:
                    paths[slots[first]] = uid, length, begins[row] + 1, tail
                first += written
    return [*longest.values()], suspects


def read_entries(pool: PoolState, segments: Sequence[Segment]) -> Entries:
    """What these segments read, row by row, and when it was last judged."""
    requests = [segment.request for segment in segments]
    names = np.concatenate([segment.names for segment in segments])
    rows = np.repeat(np.arange(len(segments)), [segment.length for segment in segments])
    positions = np.concatenate([segment.positions for segment in segments])
    return Entries(
        np.concatenate([segment.slots for segment in segments]),
        positions,
        rows,
        [request.request_id for request in requests],
        last_judged(requests, pool.pool_id, rows, positions),
        named(pool, names),
    )


def _is_tail(path: Path, known: Path | None) -> bool:
    """Whether it is the known path of a draft node, whose first nodes a window may hide."""
    if known is None or known[:3] != path[:3]:
        return False
    return known[3][len(known[3]) - len(path[3]) :] == path[3]


def _between(forward: Forward, row: int, start: int, length: int, position: int) -> Segment:
    """What a row reads between its prefix and what the forward writes."""
    if start > forward.bounds[row] + forward.skipped[row]:
        before = int(forward.ids[start - 1])
    else:
        before = NO_PREDECESSOR if position else ROOT
    return Segment(forward, row, start, length, position, before)


def _astray(forward: Forward, row: int, own: int, first: int, written: int) -> Segment:
    """From the first to the last entry of a row's end that names another slot than the forward writes there."""
    differs = forward.ids[own : own + written] != forward.planned.slots[first : first + written]
    begin, end = np.flatnonzero(differs)[[0, -1]].tolist()
    return Segment(forward, row, own + begin, end - begin + 1, 0, NO_PREDECESSOR, first + begin)
