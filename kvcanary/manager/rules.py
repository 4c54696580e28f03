"""Rules: the forwards that wait, judged rule by rule, where the fast path has not proved all that is asked of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from kvcanary.calls.coverage import Coverage
from kvcanary.calls.entries import Entries, join_entries, written_entries
from kvcanary.calls.forward import Forward, Ints, on_host
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch, ViolationLog
from kvcanary.checks.content import find_changed
from kvcanary.checks.fast_path import Unproved
from kvcanary.checks.lengths import judge_lengths, judge_mask, judge_starts
from kvcanary.checks.row_spans import read_entries, sort_rows
from kvcanary.checks.rows import Reader, Verdict
from kvcanary.checks.seals import Sealer
from kvcanary.checks.stores import judge_finite, keep_fingerprints
from kvcanary.checks.tokens import Oracle, judge_tokens
from kvcanary.checks.writes import judge_layers
from kvcanary.config import CanaryConfig
from kvcanary.ledger.ledger import Ledger
from kvcanary.ledger.requests import Batch
from kvcanary.records.fingerprints import joined, slots_are_right
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.scrub.scrubber import Scrubber


class Rewritten(NamedTuple):
    """Slots of a pool, [n] int64, whose bytes are no longer those that pending forwards have read."""

    pool: PoolState
    slots: Ints


class Rules:
    """What forwards planned and stored, then what they read, pool by pool.

    is_full: all bytes that a forward reads are compared, too
    oracle: who knows tokens that the host does not know yet; None: nobody
    judged: is given the forwards of a pool when they have been judged
    """

    def __init__(
        self,
        state: CanaryState,
        ledger: Ledger,
        record_store: RecordStore,
        scrubber: Scrubber,
        coverage: Coverage,
        violations: ViolationLog,
        config: CanaryConfig,
    ) -> None:
        """`violations`: where what fires goes."""
        self._state, self._ledger, self._record_store = state, ledger, record_store
        self._scrubber, self._coverage, self._violations = scrubber, coverage, violations
        self._reader = Reader(state, ledger, record_store, config.disable)
        self.sealer = Sealer(record_store, ledger)
        self.is_full = config.content == "full" and "R9" not in config.disable
        self.oracle: Oracle | None = None
        self.judged: Callable[[Sequence[Forward], Verdict], None] = lambda forwards, verdict: None

    @torch.inference_mode()
    def judge(self, forwards: Sequence[Forward], rewritten: Rewritten | None, left: Unproved) -> None:
        """`left`: by the fast path; `rewritten`: what a declared move has put other bytes into since."""
        if left is Unproved.ALL:
            self._violations += self._judge_plans(forwards)
        for pool in self._state.pools:
            own = [forward for forward in forwards if forward.pool is pool]
            if own:
                self._judge_reads(pool, own, rewritten, is_clean=left is Unproved.NOTHING)

    def _judge_plans(self, forwards: Sequence[Forward]) -> list[Violation | ViolationBatch]:
        """What forwards planned and stored, rule by rule; then all of it is sealed."""
        violations: list[Violation | ViolationBatch] = []
        for forward in forwards:
            forward.read_rows()
            violations += [*judge_layers(forward), *judge_finite(forward)]
            violations += [*judge_tokens(forward, self.oracle), *judge_mask(forward)]
        violations += self.sealer.seal(forwards)
        self._record_store.flush()
        for forward in forwards:
            keep_fingerprints(forward)
            violations += [*judge_lengths(forward), *judge_starts(forward)]
            before, written = array("q", forward.prefixes), array("q", forward.written[:: forward.width])
            batch, pool_id = Batch(forward.requests), forward.pool.pool_id
            self._ledger.steps.write_rows(batch, forward.kind, pool_id, before, written)
        return violations

    def _judge_reads(
        self, pool: PoolState, forwards: Sequence[Forward], rewritten: Rewritten | None, is_clean: bool
    ) -> None:
        """What forwards of one pool have read; `is_clean`: the identity of all that was proved."""
        for forward in forwards:
            forward.read_rows()
        if is_clean:
            verdict = Verdict([], [*chain.from_iterable(sort_rows(forwards))], [], 0)
        else:
            verdict = self._reader.judge(pool, forwards)
        if self.is_full:
            verdict.violations += self._check_all_bytes(pool, forwards, verdict, rewritten)
        self._violations += verdict.violations
        self.judged(forwards, verdict)
        self._coverage.skip("truth not known to the host", verdict.unknown_truths)

    def _check_all_bytes(
        self, pool: PoolState, forwards: Sequence[Forward], verdict: Verdict, rewritten: Rewritten | None
    ) -> list[ViolationBatch]:
        """content=full: every byte that these forwards have read or written, and that is still there."""
        last, violations = forwards[-1], list[ViolationBatch]()
        slots = joined([self._reader.slots(verdict.segments), *(forward.pool_slots for forward in forwards)])
        kept: slice | Ints = slice(None)
        if rewritten is not None and rewritten.pool is pool:
            kept = own = np.flatnonzero(~np.isin(on_host(slots), rewritten.slots))
            self._coverage.skip("entries rewritten by a move before their bytes were read", len(slots) - len(own))
            slots = slots[torch.from_numpy(own).to(slots.device)]
        self._coverage.bytes_checked += len(slots) * pool.view.slot_bytes
        if not slots_are_right(pool, slots):

            def entries() -> Entries:
                return self._entries_of(forwards, verdict).at(kept)

            violations = find_changed(pool, on_host(slots), entries, last.site, last.step, both_fingerprints=False)
        for request in {request.uid: request for forward in forwards for request in forward.requests}.values():
            self._scrubber.mark_read(pool, request, last.step)
        return violations

    def _entries_of(self, forwards: Sequence[Forward], verdict: Verdict) -> Entries:
        """What is known of every slot that was read, then of every slot that was written."""
        written = [written_entries(forward) for forward in forwards]
        if not verdict.segments:
            return join_entries(written)
        pool = forwards[0].pool
        read = read_entries(pool, verdict.segments)
        queues = [self._ledger.request(name).reads[pool.pool_id] for name in read.request_ids]
        last_reads = [-1 if (step := queue.oldest()) is None else step for queue in queues]
        read.last_good = np.array(last_reads)[read.rows]  # of the bytes: identity is good to this very step
        return join_entries([read, *written])
