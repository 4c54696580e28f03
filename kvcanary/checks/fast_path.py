"""Fast path: all forwards that wait are proved clean, sealed and noted in one compiled loop, as they nearly always are.

The loop only says that something is wrong; the rules (manager/rules.py) then judge the same forwards and name it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

import numpy as np

from kvcanary.calls.forward import Forward, Ints
from kvcanary.calls.violation_log import ViolationLog
from kvcanary.checks.seals import Sealer
from kvcanary.ledger.ledger import Judged, Ledger, Request
from kvcanary.native.layout import FACT, FORWARD, PLANS_WRONG, READS_WRONG, REQUEST, REWRITTEN, ROW_CHAIN, SEALED_BITS
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState


class Unproved(Enum):
    """What is left to the rules."""

    NOTHING = "all is clean"
    READS = "all is sealed, some row is not what it should be"
    ALL = "nothing was done"


class Prover:
    """Forwards over pools in host memory, whose rows begin at position 0 and lie where plans say."""

    def __init__(self, state: CanaryState, ledger: Ledger, record_store: RecordStore, sealer: Sealer) -> None:
        self._ledger, self._record_store, self._sealer = ledger, record_store, sealer
        self._is_able = all(pool.host is not None and not pool.is_partial for pool in state.pools)
        self._structs = np.array([pool.struct_at for pool in state.pools], np.int64)
        self._loop = state.pools[0].loops.prove_forwards

    def prove(self, forwards: Sequence[Forward], violations: ViolationLog) -> Unproved:
        """Prove, seal and note; W5 of what was sealed goes to `violations`."""
        if not self._is_able or not all(map(_is_whole, forwards)):
            return Unproved.ALL
        requests, numbers = _requests_of(forwards), array("q")
        for request in requests:
            self._add_facts(request, numbers)
        facts = np.frombuffer(numbers, np.int64).reshape(len(requests), len(self._structs), FACT.size)
        ledger = self._ledger
        found = self._loop(
            np.frombuffer(array("q", [forward.head for forward in forwards]), np.int64),
            facts,
            self._structs,
            ledger.generations,
            ledger.states,
            *self._record_store.native_memory,
        )
        if found == PLANS_WRONG:
            return Unproved.ALL
        wrong, seen = found & READS_WRONG, found >> SEALED_BITS
        if seen:
            self._record_store.epoch += bool(seen & REWRITTEN)
            violations += self._sealer.sealed(forwards, [int(forward.memory[FORWARD.seen]) for forward in forwards])
        self._note(requests, facts, has_judged=not wrong)
        return Unproved.READS if wrong else Unproved.NOTHING

    def _add_facts(self, request: Request, numbers: array[int]) -> None:
        """[pools * FACT.size] (native/layout.py)."""
        struct, epoch = request.struct, self._record_store.epoch
        row = struct[REQUEST.row], struct[REQUEST.num_row], struct[REQUEST.tokens], struct[REQUEST.num_tokens]
        common, place = (request.uid, *row), REQUEST.size  # of the chain of a pool
        for length, _, judged_in in request.judged:
            chain = struct[place + ROW_CHAIN.values], struct[place + ROW_CHAIN.count], struct[place + ROW_CHAIN.root]
            lens = struct[REQUEST.committed_len], struct[place + ROW_CHAIN.written]
            numbers.extend((*common, *chain, *lens, length if judged_in == epoch else 0, 0, 0, 0))
            place += ROW_CHAIN.size

    def _note(self, requests: Sequence[Request], facts: Ints, has_judged: bool) -> None:
        """How far rows are written, their truth is known, and they were judged clean."""
        epoch = self._record_store.epoch
        learned = facts[:, :, [FACT.row_len, FACT.num_truths, FACT.known, FACT.judged, FACT.judged_step]].tolist()
        for request, pools in zip(requests, learned, strict=True):
            struct, place = request.struct, REQUEST.size
            for pool_id, (row_len, num_truths, known, judged, step) in enumerate(pools):
                struct[place + ROW_CHAIN.written] = row_len
                struct[place + ROW_CHAIN.count] = max(struct[place + ROW_CHAIN.count], num_truths)
                place += ROW_CHAIN.size
                if has_judged and judged:
                    request.judged[pool_id] = Judged(max(known, judged), step, epoch)


def _requests_of(forwards: Sequence[Forward]) -> list[Request]:
    """All of them, each once."""
    batches = {forward.request_ids: forward.requests for forward in forwards}.values()  # most steps have one
    return list({request.uid: request for batch in batches for request in batch}.values())


def _is_whole(forward: Forward) -> bool:
    """Whether nothing was refused, every layer has stored, and the loop reads what the plan names."""
    return forward.is_usable and forward.stored == forward.pool.full_layers and forward.dense_indices is forward.indices
