"""Rows: judge everything that the pending forwards of one pool have read, along their index arrays.

A row is right when it names the slots that its request was granted, when their records are bit for bit those that the
canary wrote, and when what the canary wrote is the request's own tokens. All three are plain comparisons. Only a row
that fails one is a suspect: its records are judged entry by entry, and every check that fires is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.calls.entries import Entries, fired_writes
from kvcanary.calls.forward import Forward, Ints, on_host
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.checks.row_spans import Segment, read_entries, sort_rows
from kvcanary.ledger.ledger import Judged, Ledger, Request
from kvcanary.pools.slot_maps import SLOT_BYTES
from kvcanary.records.fingerprints import joined
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState, PoolState
from kvcanary_kernels.judge.verify import NO_PREDECESSOR, ROOT, verify_torch
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import CODE_BITS, SHARED, signed


@dataclass(slots=True)
class Verdict:
    """What judging gave; `segments` hold every entry that was read and that these forwards did not write.

    suspects: those of rows that do not name what they should
    """

    violations: list[Violation | ViolationBatch]
    segments: list[Segment]
    suspects: list[Segment]
    unknown_truths: int


class Reader:
    """R2 to R8, R11 and R12 of what forwards have read."""

    def __init__(self, state: CanaryState, ledger: Ledger, record_store: RecordStore, disabled: frozenset[str]) -> None:
        self._state, self._ledger, self._record_store = state, ledger, record_store
        self._active = {code: bit for code, bit in CODE_BITS.items() if code not in disabled}
        self._active_bits = sum(self._active.values())
        self._judges_truth = "R6" not in disabled
        self._unknown_truths = 0

    def judge(self, pool: PoolState, forwards: Sequence[Forward]) -> Verdict:
        self._unknown_truths = 0
        prefixes, strange = sort_rows(forwards)
        untrue = self._untrue(pool, prefixes) if self._records_are_intact(pool, prefixes) else prefixes
        violations: list[Violation | ViolationBatch] = []
        by_step: dict[int, list[Segment]] = {}
        for segment in strange + untrue:
            by_step.setdefault(segment.forward.step, []).append(segment)
        for step, suspects in sorted(by_step.items()):
            violations += self._violations(pool, step, suspects)
        for forward in forwards:
            if forward.write_slots and min(forward.write_slots) < pool.view.null_slots and "R2" in self._active:
                violations.append(_null_writes(forward))
        if pool.view.slot_map is not None and "R8" in self._active:
            violations += _shared_slots(forwards, prefixes + strange)
        return Verdict(violations, prefixes + strange, strange, self._unknown_truths)

    def slots(self, segments: Sequence[Segment]) -> Tensor:
        """[n] int64: the slots of all segments."""
        if not segments:
            return self._state.arange[:0]
        return joined([s.forward.pool_indices.narrow(0, s.start, s.length) for s in segments])

    # right rows

    def _records_are_intact(self, pool: PoolState, segments: Sequence[Segment]) -> bool:
        host = pool.host
        if host is None:
            slots = self.slots(segments)
            return torch.equal(pool.records.index_select(0, slots), pool.expected.index_select(0, slots))
        match = pool.loops.match_records
        places = [s.forward.host_ids.data_ptr() + s.start * SLOT_BYTES for s in segments]
        return all(
            match(place, s.length, host.records, host.expected) for place, s in zip(places, segments, strict=True)
        )

    def _untrue(self, pool: PoolState, segments: Sequence[Segment]) -> list[Segment]:
        """Those that are not their request's own row; what was judged before and was not rewritten still is."""
        untrue: list[Segment] = []
        for segment in segments:
            known, end = self._known(pool, segment), segment.end_position
            if known < end:
                chains = self._ledger.truths(segment.request, pool.pool_id, end)
                if chains is None or not self._is_written(pool, segment, known, chains[known:end]):
                    untrue.append(segment)
                    continue
            judged = Judged(max(known, end), segment.forward.step, self._record_store.epoch)
            segment.request.judged[pool.pool_id] = judged
        return untrue

    def _known(self, pool: PoolState, segment: Segment) -> int:
        """The position up to which this row was judged and not rewritten since."""
        if pool.is_partial:
            return segment.first_position
        judged = segment.request.judged[pool.pool_id]
        return judged.length if judged.epoch == self._record_store.epoch else 0

    def _is_written(self, pool: PoolState, segment: Segment, known: int, chains: NDArray[np.uint64]) -> bool:
        """Whether it holds these chains from a position on, of every layer, under the current grants; then judged."""
        forward, place = segment.forward, (segment.start + known - segment.first_position) * SLOT_BYTES
        return pool.loops.are_written(
            forward.host_ids.data_ptr() + place,
            forward.host_names.data_ptr() + place,
            chains.view(np.int64),
            self._ledger.generations,
            pool.struct_at,
            forward.step,
            self._record_store.memory,
            self._record_store.judged,
            not pool.is_partial,
        )

    # suspects

    def _violations(self, pool: PoolState, step: int, segments: Sequence[Segment]) -> list[Violation | ViolationBatch]:
        """Every check that fires for these entries; R6 for whole rows in which nothing else does."""
        slots = self.slots(segments)
        bits, first = on_host(self._codes(pool, step, segments, slots)) & self._active_bits, 0
        violations: list[Violation | ViolationBatch] = []
        for forward, group in groupby(segments, lambda segment: segment.forward):
            own = list(group)
            end = first + sum(segment.length for segment in own)
            violations += self._violations_of(forward, own, bits[first:end])
            first = end
        return violations

    def _codes(self, pool: PoolState, step: int, segments: Sequence[Segment], slots: Tensor) -> Tensor:
        """[n] int64: check bits of every entry of these segments."""
        state, codes = self._state, torch.zeros_like(slots)
        repeats = [segment.length if segment.first_written >= 0 else 1 for segment in segments]

        def spread(values: Iterable[int]) -> Tensor:
            """[judged] int64: entries that the forward writes are judged one by one."""
            return _on_device(np.repeat(np.fromiter(values, np.int64, len(segments)), repeats), slots)

        lengths = spread(1 if segment.first_written >= 0 else segment.length for segment in segments)
        names = joined([segment.forward.indices.narrow(0, segment.start, segment.length) for segment in segments])
        continued = [self._continued(pool, segment) for segment in segments]
        verify_torch(
            pool.records,
            slots,
            starts=lengths.cumsum(0) - lengths,
            lengths=lengths,
            first_positions=_on_device(np.concatenate([s.judged_positions for s in segments]), slots),
            predecessors=spread(predecessor for predecessor, _ in continued),
            seeds=spread(signed(seed) for _, seed in continued),
            layers=pool.layers,
            null_slots=pool.view.null_slots,
            pool_id=pool.pool_id,
            keys=pool.keys,
            codes=codes,
            **state.page_truth(pool, slots, names),
            readers=spread(segment.request.uid for segment in segments),
            step=state.ints([step]),
        )
        overwritten = (pool.records.index_select(0, slots) != pool.expected.index_select(0, slots)).any(1)
        codes[overwritten & (codes == 0)] = CODE_BITS["R3"]  # words that the seal does not cover
        return codes

    def _continued(self, pool: PoolState, segment: Segment) -> tuple[int, int]:
        """The predecessor of a segment and the chain that it seeds: that of the request's tokens before a window."""
        if segment.predecessor != ROOT:
            return segment.predecessor, 0
        truth = self._ledger.truth(segment.request, pool.pool_id, segment.first_position)
        return (NO_PREDECESSOR, 0) if truth is None else (ROOT, truth)

    def _violations_of(
        self, forward: Forward, segments: Sequence[Segment], bits: Ints
    ) -> list[Violation | ViolationBatch]:
        """One batch a check for these segments of one forward; R5 and R6 by row, where no other check fires."""
        violations: list[Violation | ViolationBatch] = []
        refused = _refused_reads(forward)
        ends = np.cumsum([segment.length for segment in segments])
        for segment, own in zip(segments, np.split(bits, ends[:-1]), strict=True):
            if refused is not None:
                own[refused[segment.start : segment.start + segment.length]] = 0  # R1 was reported at open
            if segment.first_written >= 0:
                violations += self._judge_own(segment, own)
            elif segment.predecessor == ROOT and segment.length:
                names = segment.names
                own |= grant_codes(self._ledger, segment.request, segment.first_position, names) & self._active_bits
                if not own.any():
                    violations += self._judge_truth(segment)
        fired = int(np.bitwise_or.reduce(bits))
        if fired:
            entries = read_entries(forward.pool, segments)
            violations += [
                _batch(code, forward, entries, bits & bit) for code, bit in self._active.items() if fired & bit
            ]
        return violations

    def _judge_truth(self, segment: Segment) -> list[Violation]:
        """R6: the record at S - 1 is not the end of this request's own tokens."""
        pool, end = segment.forward.pool, segment.end_position
        truth = self._ledger.truth(segment.request, pool.pool_id, end)
        if truth is None:
            self._unknown_truths += 1
        if truth is None or not self._judges_truth:
            return []
        slots = segment.slots
        if int(pool.records[slots[-1], record.CHAIN]) == signed(truth):
            return []
        last = replace(segment, start=segment.start + segment.length - 1, length=1, first_position=end - 1)
        violation = _batch("R6", segment.forward, read_entries(pool, [last]), np.ones(1)).violation(0)
        violation.row_slots = slots
        return [violation]

    def _judge_own(self, segment: Segment, bits: Ints) -> list[ViolationBatch]:
        """R5 where attention reads another chain than the one that this forward wrote for the same entry."""
        forward, slots = segment.forward, segment.slots
        own = forward.planned.slots[segment.written]
        if "R5" not in self._active:
            return []
        differs = (bits == 0) & (slots >= forward.pool.view.null_slots)
        read, written = (_held(forward.pool, ids[differs], record.CHAIN) for ids in (slots, own))
        differs[differs] = read != written
        return [_batch("R5", forward, read_entries(forward.pool, [segment]), differs)] if differs.any() else []


def grant_codes(ledger: Ledger, request: Request, first_position: int, names: Ints) -> Ints:
    """[n] int64: R7 or R8 for entries of a row, from a position on, on shared pages that it does not hold; else 0.

    names: [n] int64, slots as plans name them, inside the pool or not

    A free page, and another request's private one, say so themselves. A shared page has no owner: its bytes may be
    right, and its tokens those that the row would have had, but it may be evicted and reused at any time.
    R7: the row has given the page back, or was granted none for this position. R8: it was granted another one there.
    An own page in the place of another is left to the positions that its records hold (R4).
    """
    granted, codes = request.slots[first_position : first_position + len(names)], np.zeros_like(names)
    known = np.full(len(names), -1)
    known[: len(granted)] = granted
    strange = np.flatnonzero(names != known)
    pages = names[strange] // ledger.page_size
    for page in np.unique(pages).tolist():
        is_shared = 0 <= page < len(ledger.states) and ledger.states[page] == SHARED
        if not is_shared or page in request.pages:
            continue
        own = strange[pages == page]
        is_foreign = (known[own] >= 0) & (not ledger.had(page, request.request_id))
        codes[own] = np.where(is_foreign, CODE_BITS["R8"], CODE_BITS["R7"])
    return codes


def _batch(code: str, forward: Forward, entries: Entries, fired: NDArray[Any]) -> ViolationBatch:
    """One check at the entries where `fired` is not zero, with the positions that R4 has found."""
    evidence = {}
    if code == "R4":
        evidence["found_positions"] = _held(forward.pool, entries.slots, record.TOKEN_POSITION) >> 32
    return entries.fired(code, forward.pool, forward.site, forward.step, np.flatnonzero(fired), **evidence)


def _shared_slots(forwards: Sequence[Forward], segments: Sequence[Segment]) -> list[ViolationBatch]:
    """R8 for every entry whose slot holds another slot of the full group too, as far as these forwards read."""
    if not segments:
        return []
    pool = forwards[0].pool
    entries = read_entries(pool, segments)
    names = np.concatenate([segment.names for segment in segments])
    pairs = np.unique(np.stack([entries.slots, names]), axis=1)
    slots, holders = np.unique(pairs[0], return_counts=True)
    shared = slots[(holders > 1) & (slots >= pool.view.null_slots)]
    which = np.flatnonzero(np.isin(entries.slots, shared))
    last = forwards[-1]
    return [entries.fired("R8", pool, last.site, last.step, which)] if len(which) else []


def _held(pool: PoolState, slots: Ints, column: int) -> Ints:
    """[n] int64: one column of the records of these slots."""
    return on_host(pool.records[_on_device(slots, pool.records), column])


def _on_device(values: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _null_writes(forward: Forward) -> ViolationBatch:
    """R2 for the entries that live rows write to, and so read from, null slots."""
    is_null = forward.planned.slots < forward.pool.view.null_slots
    if forward.refused is not None:
        is_null[forward.refused.entries] = False  # W1 was reported at open
    return fired_writes("R2", forward, np.flatnonzero(is_null))


def _refused_reads(forward: Forward) -> NDArray[np.bool_] | None:
    """By entry of the indices whether it was refused; None: none was."""
    if forward.refused_reads is None:
        return None
    refused = np.zeros(len(forward.ids), np.bool_)
    refused[forward.refused_reads.entries] = True
    return refused
