"""Fast path: a step that is clean, as nearly all are, is judged by one compiled loop.

A `Prover` has forwards that the host judges, a `RunReader` what the device says of those that judged themselves. The
loop only says that something is wrong; the rules (manager/rules.py, `CapturedStep.learn`) then judge the same forwards
and name it.
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
from kvcanary.ledger.page_states import Pages
from kvcanary.native.layout import (
    FACT,
    FORWARD,
    LACKS_ROOM,
    LEFT_TO_RULES,
    MESSAGE_BITS,
    NOT_QUIET,
    PAGES_FRESH,
    PLANS_WRONG,
    QUIET,
    READS_WRONG,
    REQUEST,
    REWRITES,
    REWRITTEN,
    ROW_CHAIN,
    RUN,
    RUN_BITS,
    SAID,
    SEALED_BITS,
    filled,
)
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


class RunReader:
    """Runs of captured forwards, read in their order: the ledger goes on by what they say of pages and records.

    said: how far `prove` came, SAID (native/layout.py)
    """

    def __init__(
        self, state: CanaryState, pages: Pages, record_store: RecordStore, headers: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """`headers`: as of `SubstepRegistry.seen`; `prove` needs them."""
        self._pages, self._record_store, loops = pages, record_store, state.pools[0].loops
        self._read_runs, self._collect_quiet = loops.read_runs, loops.collect_quiet
        self._tables = array("q", (pages.states.ctypes.data, *record_store.flags_address))
        self._books_at, self._page_size = self._tables.buffer_info()[0], state.page_size
        self.said = array("q", bytes(8 * SAID.size))
        seen, counts, header = headers
        own = {"tables": self._books_at, "page_size": state.page_size, "final": pages.final_at}
        said_at = self.said.buffer_info()[0]
        self._quiet = filled(QUIET, **own, seen=seen, counts=counts, header=header, said=said_at)
        self._quiet_at = self._quiet.buffer_info()[0]

    def prove(
        self,
        structs: array[int],
        num_moves: int,
        move_structs: array[int],
        planned: array[int],
        kept: array[int],
        proves: bool,
    ) -> int:
        """`loops.collect_quiet` of a step, from where `said` stands; the record store knows what is new, if it is done.

        structs, move_structs: of its runs and moves;  planned: rows, entries and reads that were expected
        kept: room for what the flight recorder keeps;  proves: tokens that the host knows are compared, too
        """
        runs = len(structs) // RUN.size, structs.buffer_info()[0], num_moves, move_structs.buffer_info()[0]
        at = planned.buffer_info()[0], proves, kept.buffer_info()[0], self._quiet_at
        found: int = self._collect_quiet(*runs, *at)
        if found not in (NOT_QUIET, LACKS_ROOM):
            self._record_store.collected(self.said[SAID.seen] >> RUN_BITS & REWRITES)
        return found

    def read(self, first: int, end: int, structs: array[int], planned: array[int], proves: bool) -> int:
        """`loops.read_runs` of these of the runs: how far it came, `first` where requests lack room."""
        at = structs.buffer_info()[0], self._books_at, planned.buffer_info()[0]
        return int(self._read_runs(first, end, *at, proves))

    def is_clean(self, seen: int, slots: Ints) -> bool:
        """Whether nothing is left to the rules: pages are written then, and the record store knows new records.

        seen: what the loop says of the message;  slots: those that it names as safe to write
        """
        if seen & LEFT_TO_RULES:
            return False
        if seen & PAGES_FRESH:
            self._pages.wrote(slots[: seen >> MESSAGE_BITS], self._page_size)
        self._record_store.collected(seen & REWRITES)
        return True


def _requests_of(forwards: Sequence[Forward]) -> list[Request]:
    """All of them, each once."""
    batches = {forward.request_ids: forward.requests for forward in forwards}.values()  # most steps have one
    return list({request.uid: request for batch in batches for request in batch}.values())


def _is_whole(forward: Forward) -> bool:
    """Whether nothing was refused, every layer has stored, and the loop reads what the plan names."""
    return forward.is_usable and forward.stored == forward.pool.full_layers and forward.dense_indices is forward.indices
