"""Judge everything that was read since the last check: what is unchanged at once, what is new by the twin.

Where anything is unequal, `blame` judges the row in full from the records themselves and names what fired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcanary.blame import Blamer, Segment
from kvcanary.forward import Forward, slot_ids
from kvcanary.hits import Hit
from kvcanary.ledger import Ledger
from kvcanary.state import CanaryState, PoolState
from kvcanary.twin import SLOT_BYTES, Twin
from kvcanary_kernels.record import CODE_BITS

#: Checks of identity; all need the same comparison.
IDENTITY_CODES = frozenset(CODE_BITS) - {"R1"}


@dataclass(slots=True)
class Verdict:
    """What judging gave.

    slots:          by pool, the prefix slots of every row, once
    segments:       by pool, where these slots come from
    unknown_truths: rows whose truth the host does not know
    """

    hits: list[Hit] = field(default_factory=list)
    slots: dict[PoolState, Tensor] = field(default_factory=dict)
    segments: dict[PoolState, list[Segment]] = field(default_factory=dict)
    unknown_truths: int = 0


class Reader:
    """Judges R2, R3, R4, R5, R6 and R12 of everything that forwards have read."""

    def __init__(self, state: CanaryState, ledger: Ledger, twin: Twin, disabled: frozenset[str]) -> None:
        self._state, self._ledger, self._twin = state, ledger, twin
        self._active = (IDENTITY_CODES | {"R6"}) - disabled
        self._blamer = Blamer(state, ledger, self._active)

    def judge(self, forwards: Sequence[Forward]) -> Verdict:
        verdict = Verdict()
        for pool in self._state.pools:
            own = [forward for forward in forwards if forward.pool is pool]
            if own:
                self._judge_prefixes(pool, own, verdict)
                self._judge_tails(own, verdict)
        return verdict

    def _judge_prefixes(self, pool: PoolState, forwards: Sequence[Forward], verdict: Verdict) -> None:
        segments = _longest_prefixes(forwards)
        if not segments:
            return
        verdict.segments[pool] = segments
        slots = verdict.slots[pool] = _gather(segments)
        suspects = [segment for segment in segments if not self._judge_new_entries(pool, segment, verdict)]
        records = pool.records.index_select(0, slots)
        if not torch.equal(records, pool.expected.index_select(0, slots)):
            suspects = segments
        odd = [
            Segment(forward, row, forward.bounds[row], forward.prefix_len(row), 0, -1, whole=True)
            for forward in forwards
            for row in forward.odd_rows
        ]
        if suspects or odd:
            hits = self._blamer.judge(pool, [*suspects, *odd])
            verdict.hits += hits
            self._forget(pool, suspects)

    def _judge_new_entries(self, pool: PoolState, segment: Segment, verdict: Verdict) -> bool:
        """Whether the entries that joined the row since it was last judged continue it, up to the host's truth."""
        request, twin, length = segment.request, self._twin, segment.length
        known = request.known[pool.pool_id]
        if known.epoch != twin.epoch:
            known.judged, known.epoch = 0, twin.epoch
        if known.judged >= length:
            return True
        start = known.judged
        slots = slot_ids(known.raw[max(start - 1, 0) * SLOT_BYTES : length * SLOT_BYTES])
        before = pool.root
        if start:
            before = twin.chain(pool.base + slots.pop(0))
        grants, size = self._ledger.generations, self._state.page_size
        granted = [grants[slot // size] for slot in slots]
        if not twin.judge(start, before, [pool.base + slot for slot in slots], granted):
            return False
        if "R6" in self._active:
            truth = self._ledger.truth(request, pool.pool_id, length)
            if truth is None:
                verdict.unknown_truths += 1
            elif truth != twin.chain(pool.base + slots[-1]):
                return False
        known.judged = length
        return True

    def _forget(self, pool: PoolState, segments: Sequence[Segment]) -> None:
        """Rows that were not judged clean are judged again from where they were."""
        for segment in segments:
            known = segment.request.known[pool.pool_id]
            known.raw = known.raw[: known.judged * SLOT_BYTES]

    def _judge_tails(self, forwards: Sequence[Forward], verdict: Verdict) -> None:
        """Tails that are a path, then the forward's own writes, were sealed by this very check; judge the others."""
        for forward in forwards:
            for row in forward.lost_rows:
                start = forward.bounds[row] + forward.prefix_len(row)
                length = len(forward.tails[row]) - forward.written[row]
                verdict.hits += self._blamer.judge(forward.pool, [self._tail(forward, row, start, length)])
            for row in forward.astray_rows:
                verdict.hits += self._blamer.judge_astray(forward, row)
            if forward.write_slots and min(forward.write_slots) < forward.pool.view.null_slots:
                verdict.hits += self._blamer.null_writes(forward)

    def _tail(self, forward: Forward, row: int, start: int, length: int) -> Segment:
        prefix = forward.prefix_len(row)
        source = forward.row_slots(start - 1, start)[0] if prefix else -1
        return Segment(forward, row, start, length, prefix, source, whole=False)


def _longest_prefixes(forwards: Sequence[Forward]) -> list[Segment]:
    """For each request the longest prefix that names the slots of its known row."""
    longest: dict[int, Segment] = {}
    for forward in forwards:
        width = forward.read.rows_per_request
        for number, request in enumerate(forward.requests):
            length, found = forward.prefixes[number], longest.get(request.uid)
            if not length or (found is not None and found.length >= length):
                continue
            row = number * width
            if forward.odd_rows and row in forward.odd_rows:
                continue
            longest[request.uid] = Segment(forward, row, forward.bounds[row], length, 0, -1, whole=True)
    return list(longest.values())


def _gather(segments: Sequence[Segment]) -> Tensor:
    slots = [segment.forward.indices.narrow(0, segment.start, segment.length) for segment in segments]
    return slots[0] if len(slots) == 1 else torch.cat(slots)
