"""Reading: judge everything that the pending forwards of one pool have read, along their index arrays.

A row is right when it names the slots that its request was granted, when their records are bit for bit those that the
canary wrote, and when what the canary wrote is the request's own tokens. All three are plain comparisons. Only a row
that fails one is a suspect: its records are judged entry by entry, and every check that fires is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.forward import SLOT_BYTES, Forward, Ints
from kvcanary.hits import Hit
from kvcanary.lanes import joined
from kvcanary.ledger import Judged, Ledger, Request
from kvcanary.mirror import Mirror
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels import record
from kvcanary_kernels.record import (
    CHAIN,
    CODE_BITS,
    LAYERS_HIGH,
    LAYERS_LOW,
    R3_RECORD_DAMAGED,
    REQUEST_GENERATION,
    STEP_SITE,
    bitmap_columns,
    signed,
)
from kvcanary_kernels.verify import NO_PREDECESSOR, ROOT, verify_torch


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive entries of one row.

    start, length:  where in the indices of the forward
    first_position: of its first entry
    predecessor:    slot that its first entry continues, ROOT, or NO_PREDECESSOR: not judged
    entry:          of the write plan, where the row should read what the forward itself writes; else -1
    """

    forward: Forward
    row: int
    start: int
    length: int
    first_position: int = 0
    predecessor: int = ROOT
    entry: int = -1

    @property
    def request(self) -> Request:
        return self.forward.request_of(self.row)

    @property
    def slots(self) -> list[int]:
        return self.forward.ids[self.start : self.start + self.length].tolist()


@dataclass(slots=True)
class Sorted:
    """The rows of some forwards: for each request the longest that names its grants, and what does not."""

    longest: dict[int, Segment] = field(default_factory=dict)
    suspects: list[Segment] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """What judging gave; `segments` hold every entry that was read and that these forwards did not write."""

    hits: list[Hit]
    segments: list[Segment]
    unknown_truths: int


class Reader:
    """R2 to R8 and R12 of what forwards have read."""

    def __init__(self, state: CanaryState, ledger: Ledger, mirror: Mirror, disabled: frozenset[str]) -> None:
        self._state, self._ledger, self._mirror = state, ledger, mirror
        self._active = {code: bit for code, bit in CODE_BITS.items() if code not in disabled}
        self._judges_truth = "R6" not in disabled
        self._unknown_truths = 0

    def judge(self, pool: PoolState, forwards: Sequence[Forward]) -> Verdict:
        self._unknown_truths = 0
        rows = sort_rows(forwards)
        prefixes = list(rows.longest.values())
        if self._records_are_intact(pool, prefixes):
            rows.suspects += self._untrue(pool, prefixes)
        else:
            rows.suspects += prefixes
        hits: list[Hit] = []
        for step in sorted({segment.forward.step for segment in rows.suspects}):
            hits += self._hits(pool, step, [segment for segment in rows.suspects if segment.forward.step == step])
        for forward in forwards:
            if forward.write_slots and min(forward.write_slots) < pool.view.null_slots:
                hits += self._null_writes(forward)
        return Verdict(hits, prefixes + [s for s in rows.suspects if s not in prefixes], self._unknown_truths)

    def slots(self, segments: Sequence[Segment]) -> Tensor:
        """[n] int64: the slots of all segments."""
        if not segments:
            return self._state.arange[:0]
        return joined([segment.forward.indices.narrow(0, segment.start, segment.length) for segment in segments])

    # right rows

    def _records_are_intact(self, pool: PoolState, segments: Sequence[Segment]) -> bool:
        slots = self.slots(segments)
        return torch.equal(pool.records.index_select(0, slots), pool.expected.index_select(0, slots))

    def _untrue(self, pool: PoolState, segments: Sequence[Segment]) -> list[Segment]:
        """Those that are not their request's own row; what was judged before and was not rewritten still is."""
        right: list[Segment] = []
        untrue: list[Segment] = []
        new: list[tuple[Segment, Ints, NDArray[np.uint64]]] = []
        for segment in segments:
            known, length = self._known(pool, segment), segment.length
            chains = self._ledger.truths(segment.request, pool.pool_id, length) if known < length else None
            if chains is not None:
                rows = segment.forward.ids[segment.start + known : segment.start + length] + pool.base
                new.append((segment, rows, chains[known:length]))
            else:
                (untrue if known < length else right).append(segment)
        written = self._are_written(pool, new) if new else []
        for (segment, rows, _), are_written in zip(new, written, strict=True):
            self._mirror.judged[rows] |= are_written
            (right if are_written else untrue).append(segment)
        for segment in right:
            judged = Judged(max(self._known(pool, segment), segment.length), segment.forward.step, self._mirror.epoch)
            segment.request.judged[pool.pool_id] = judged
        return untrue

    def _known(self, pool: PoolState, segment: Segment) -> int:
        """How many entries of this row were judged and not rewritten since."""
        judged = segment.request.judged[pool.pool_id]
        return judged.length if judged.epoch == self._mirror.epoch else 0

    def _are_written(self, pool: PoolState, new: Sequence[tuple[Segment, Ints, NDArray[np.uint64]]]) -> list[bool]:
        """By segment, whether its rows hold these chains, written by every layer, under the current grants."""
        rows = np.concatenate([rows for _, rows, _ in new])
        written = self._mirror.table[rows]
        grants = self._ledger.generations[(rows - pool.base) // self._state.page_size].view(np.uint64)
        low, high = bitmap_columns(pool.full_layers)
        right = written[:, CHAIN] == np.concatenate([chains for *_, chains in new])
        right &= written[:, REQUEST_GENERATION] >> 32 == grants
        steps = np.repeat([segment.forward.step for segment, *_ in new], [len(rows) for _, rows, _ in new])
        right &= (steps - written[:, STEP_SITE].view(np.int64)).astype(np.int32) >= 0  # low words, with a sign
        right &= written[:, LAYERS_LOW] == low
        right &= written[:, LAYERS_HIGH] == high
        if right.all():
            return [True] * len(new)
        ends = np.cumsum([len(rows) for _, rows, _ in new])
        return [bool(part.all()) for part in np.split(right, ends[:-1])]

    # suspects

    def _hits(self, pool: PoolState, step: int, segments: Sequence[Segment]) -> list[Hit]:
        """Every check that fires for these entries; R6 for whole rows in which nothing else does."""
        slots = self.slots(segments)
        codes = self._codes(pool, step, segments, slots)
        overwritten = (pool.records.index_select(0, slots) != pool.expected.index_select(0, slots)).any(1)
        codes[overwritten & (codes == 0)] = R3_RECORD_DAMAGED  # words that the seal does not cover
        hits: list[Hit] = []
        for segment, part in zip(segments, codes.split([segment.length for segment in segments]), strict=True):
            own = self._hits_of(segment, part)
            if not own and segment.entry >= 0:
                own = self._judge_own(pool, segment)
            elif not own and segment.first_position == 0 and segment.length:
                own = self._judge_truth(pool, segment)
            hits += own
        return hits

    def _codes(self, pool: PoolState, step: int, segments: Sequence[Segment], slots: Tensor) -> Tensor:
        """[n] int64: check bits of every entry of these segments."""
        state, codes = self._state, torch.zeros_like(slots)
        lengths = state.ints(segment.length for segment in segments)
        verify_torch(
            pool.records,
            slots,
            starts=lengths.cumsum(0) - lengths,
            lengths=lengths,
            first_positions=state.ints(segment.first_position for segment in segments),
            predecessors=state.ints(segment.predecessor for segment in segments),
            seeds=state.ints(signed(segment.request.root(pool.pool_id)) for segment in segments),
            generations=state.generations[: pool.view.num_pages],
            layers=pool.layers,
            page_size=state.page_size,
            null_slots=pool.view.null_slots,
            pool_id=pool.pool_id,
            keys=pool.keys,
            codes=codes,
            states=state.page_states[: pool.view.num_pages],
            owners=state.owners[: pool.view.num_pages],
            readers=state.ints(segment.request.uid for segment in segments),
            step=state.ints([step]),
        )
        return codes

    def _hits_of(self, segment: Segment, codes: Tensor) -> list[Hit]:
        hits: list[Hit] = []
        for place in codes.nonzero().flatten().tolist():
            if segment.start + place not in segment.forward.refused_reads:  # R1 was reported at open
                bits = int(codes[place])
                hits += [_hit(code, segment, place) for code, bit in self._active.items() if bits & bit]
        return hits

    def _judge_truth(self, pool: PoolState, segment: Segment) -> list[Hit]:
        """R6: the record at S - 1 is not the end of this request's own tokens."""
        truth = self._ledger.truth(segment.request, pool.pool_id, segment.length)
        if truth is None:
            self._unknown_truths += 1
        if truth is None or not self._judges_truth:
            return []
        slots = segment.slots
        if int(pool.records[slots[-1], record.CHAIN]) == signed(truth):
            return []
        hit = _hit("R6", segment, segment.length - 1)
        hit.row_slots = tuple(slots)
        return [hit]

    def _judge_own(self, pool: PoolState, segment: Segment) -> list[Hit]:
        """R5 where attention reads another chain than the one that this forward wrote for the same entry."""
        slot, own = segment.slots[0], segment.forward.write_slots[segment.entry]
        chains = pool.records[:, record.CHAIN]
        refused = segment.start in segment.forward.refused_reads or slot < pool.view.null_slots
        if refused or "R5" not in self._active or int(chains[slot]) == int(chains[own]):
            return []
        return [_hit("R5", segment, 0)]

    def _null_writes(self, forward: Forward) -> list[Hit]:
        """R2 for the entries that live rows write to, and so read from, null slots."""
        hits: list[Hit] = []
        first, null_slots = 0, forward.pool.view.null_slots
        for row, written in enumerate(forward.written if "R2" in self._active else ()):
            for entry, slot in enumerate(forward.write_slots[first : first + written], first):
                if slot < null_slots and entry not in forward.refused:
                    place = forward.bounds[row + 1] - written + entry - first
                    hits.append(_hit("R2", _own_entry(forward, row, place, entry), 0))
            first += written
        return hits


def sort_rows(forwards: Sequence[Forward]) -> Sorted:
    """Compare every row with what it should be: its request's grants, a path of the draft tree, its own writes."""
    rows = Sorted()
    paths: dict[int, tuple[int, int, list[int]]] = {}  # by slot of a draft node: request, prefix, ancestors with itself
    for forward in forwards:
        raw, ids, bounds, slots = forward.raw, forward.ids, forward.bounds, forward.write_slots
        draft, first, width = forward.kind == "draft", 0, forward.width
        for number, (request, length) in enumerate(zip(forward.requests, forward.prefixes, strict=True)):
            granted, uid = request.row, request.uid
            if len(granted) > length * SLOT_BYTES:
                granted = granted[: length * SLOT_BYTES]
            whole = len(granted) == length * SLOT_BYTES
            longest = rows.longest.get(uid)
            for row in range(number * width, (number + 1) * width):
                start, end, written = bounds[row], bounds[row + 1], forward.written[row]
                middle, own = start + length, end - written
                if not whole or not raw.startswith(granted, start * SLOT_BYTES):
                    rows.suspects.append(Segment(forward, row, start, length))
                elif length and (longest is None or longest.length < length):
                    rows.longest[uid] = longest = Segment(forward, row, start, length)
                tail = ids[middle:end].tolist()
                if middle < own:
                    ancestors = tail[: own - middle]
                    if paths.get(ancestors[-1]) != (uid, length, ancestors):
                        before = ids[middle - 1] if length else ROOT
                        rows.suspects.append(Segment(forward, row, middle, own - middle, length, before))
                if tail[own - middle :] != slots[first : first + written]:
                    rows.suspects += _astray(forward, row, own, first, written)
                if draft and written == 1:
                    paths[slots[first]] = uid, length, tail
                first += written
    return rows


def _astray(forward: Forward, row: int, own: int, first: int, written: int) -> list[Segment]:
    """Entries at a row's end that name another slot than the one that the forward writes there."""
    return [
        _own_entry(forward, row, place, entry)
        for place, entry in zip(range(own, own + written), range(first, first + written), strict=True)
        if forward.ids[place] != forward.write_slots[entry]
    ]


def _own_entry(forward: Forward, row: int, place: int, entry: int) -> Segment:
    """What a row reads at `place`, where it should read what the forward writes as `entry`."""
    return Segment(forward, row, place, 1, int(forward.planned.positions[entry]), NO_PREDECESSOR, entry)


def _hit(code: str, segment: Segment, place: int) -> Hit:
    """A hit at one entry of a segment."""
    forward = segment.forward
    slot = int(forward.ids[segment.start + place])
    found_position = None
    if code == "R4":
        found_position = int(forward.pool.records[slot, record.TOKEN_POSITION]) >> 32
    return Hit(
        code,
        forward.pool,
        slot,
        segment.first_position + place,
        segment.request.request_id,
        forward.site,
        forward.step,
        found_position=found_position,
    )
