"""Blame: judge entries in full from their records, and name every check that fired. The slow path of reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.forward import Forward
from kvcanary.hits import Hit
from kvcanary.ledger import Ledger, Request
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels import record
from kvcanary_kernels.record import CODE_BITS, signed
from kvcanary_kernels.verify import ROOT, verify_torch


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive entries of one row.

    start, length:  where in the indices of the forward
    first_position: of its first entry
    source:         slot that its first entry continues, -1: the root
    whole:          it begins at the root and ends at S - 1, so that R6 can be judged
    """

    forward: Forward
    row: int
    start: int
    length: int
    first_position: int
    source: int
    whole: bool

    @property
    def request(self) -> Request:
        return self.forward.request_of(self.row)


class Blamer:
    """Runs the reference of the verify kernel over segments, and turns its bits into hits."""

    def __init__(self, state: CanaryState, ledger: Ledger, active: frozenset[str]) -> None:
        self._state, self._ledger, self._active = state, ledger, active

    def judge(self, pool: PoolState, segments: Sequence[Segment]) -> list[Hit]:
        """Every check that fires for these entries; R6 for whole rows in which nothing else does."""
        segments = [segment for segment in segments if segment.length]
        if not segments:
            return []
        slots = torch.cat([s.forward.indices.narrow(0, s.start, s.length) for s in segments])
        codes = self._codes(pool, segments, slots)
        overwritten = (pool.records.index_select(0, slots) != pool.expected.index_select(0, slots)).any(1)
        hits: list[Hit] = []
        first = 0
        for segment in segments:
            end = first + segment.length
            own = self._hits_of(segment, codes[first:end], overwritten[first:end])
            if not own and segment.whole:
                own = self._judge_truth(segment)
            hits += own
            first = end
        return hits

    def judge_astray(self, forward: Forward, row: int) -> list[Hit]:
        """The last entries of a row are not the slots that the forward writes: judge what lies there instead."""
        pool, end, written = forward.pool, forward.bounds[row + 1], forward.written[row]
        first = sum(forward.written[:row])
        hits: list[Hit] = []
        for number, slot in enumerate(forward.row_slots(end - written, end)):
            entry, place = first + number, end - written + number
            if slot == forward.write_slots[entry] or place in forward.refused_reads:
                continue
            segment = Segment(forward, row, place, 1, forward.write_positions[entry], -1, whole=False)
            hits += [read_hit(code, segment, 0) for code in self._codes_of_record(pool, slot, forward, entry)]
        return hits

    def null_writes(self, forward: Forward) -> list[Hit]:
        """R2 for the entries that live rows write to, and so read from, null slots."""
        hits: list[Hit] = []
        if "R2" not in self._active:
            return hits
        first, null_slots = 0, forward.pool.view.null_slots
        for row, written in enumerate(forward.written):
            for number, slot in enumerate(forward.write_slots[first : first + written]):
                if slot < null_slots and first + number not in forward.refused:
                    place = forward.bounds[row + 1] - written + number
                    position = forward.write_positions[first + number]
                    hits.append(read_hit("R2", Segment(forward, row, place, 1, position, -1, whole=False), 0))
            first += written
        return hits

    def _codes(self, pool: PoolState, segments: Sequence[Segment], slots: Tensor) -> Tensor:
        state = self._state
        lengths = state.ints(segment.length for segment in segments)
        codes = torch.zeros_like(slots)
        verify_torch(
            pool.records,
            slots,
            starts=lengths.cumsum(0) - lengths,
            lengths=lengths,
            first_positions=state.ints(segment.first_position for segment in segments),
            predecessors=state.ints(segment.source if segment.source >= 0 else ROOT for segment in segments),
            seeds=state.ints([signed(pool.root)] * len(segments)),
            generations=state.generations[: pool.view.num_pages],
            layers=pool.layers,
            page_size=state.page_size,
            null_slots=pool.view.null_slots,
            pool_id=pool.pool_id,
            keys=pool.keys,
            codes=codes,
        )
        return codes

    def _hits_of(self, segment: Segment, codes: Tensor, overwritten: Tensor) -> list[Hit]:
        hits = []
        for place in ((codes != 0) | overwritten).nonzero().flatten().tolist():
            if segment.start + place in segment.forward.refused_reads:
                continue  # R1 was reported when the forward opened
            bits = int(codes[place]) or CODE_BITS["R3"]  # words outside the seal were overwritten
            fired = [code for code, bit in CODE_BITS.items() if bits & bit and code in self._active]
            hits += [read_hit(code, segment, place) for code in fired]
        return hits

    def _judge_truth(self, segment: Segment) -> list[Hit]:
        """R6: the record at S - 1 is not the end of this request's own tokens."""
        pool, end = segment.forward.pool, segment.start + segment.length
        truth = self._ledger.truth(segment.request, pool.pool_id, segment.length)
        if truth is None or "R6" not in self._active:
            return []
        slots = segment.forward.row_slots(segment.start, end)
        if int(pool.records[slots[-1], record.CHAIN]) == signed(truth):
            return []
        hit = read_hit("R6", segment, segment.length - 1)
        hit.row_slots = tuple(slots)
        return [hit]

    def _codes_of_record(self, pool: PoolState, slot: int, forward: Forward, entry: int) -> list[str]:
        """Checks that fire when this slot is read where the forward's own entry should be."""
        if slot < pool.view.null_slots:
            return ["R2"] if "R2" in self._active else []
        found = record.read_record(pool.records, slot)
        own = record.read_record(pool.records, forward.write_slots[entry])
        fired = {
            "R3": found.seal != record.seal_host(found, slot, pool.pool_id, pool.keys),
            "R12": found.generation != self._ledger.generations[slot // self._state.page_size]
            or found.layers != pool.full_layers,
            "R4": found.position != forward.write_positions[entry],
            "R5": found.chain != own.chain,
        }
        return [code for code, fires in fired.items() if fires and code in self._active]


def read_hit(code: str, segment: Segment, place: int) -> Hit:
    """A hit at one entry of a segment."""
    forward, entry = segment.forward, segment.start + place
    slot = forward.row_slots(entry, entry + 1)[0]
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
