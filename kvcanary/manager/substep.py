"""The hooks of one forward: open, store of each layer, close; and which forwards must have opened theirs (H1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from kvcanary.calls.forward import Forward
from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.checks.lengths import own_number
from kvcanary.checks.stores import take_fingerprints
from kvcanary.checks.writes import judge_layer, refuse
from kvcanary.errors import ENGINES_DOING, HookOrderError, PlanError
from kvcanary.ledger.ledger import Request
from kvcanary.manager.session import Session
from kvcanary.pools.launch_site import SUBSTEP_KINDS, site_name
from kvcanary.pools.plans import ReadPlan, WritePlan, wrong_values
from kvcanary.pools.spans import as_admitted
from kvcanary.records.state import PoolState

NEW, OPEN, CLOSED = "not opened", "open", "closed"
MOST_NAMED = 16  # forwards that a report names as those that have opened
Announced = tuple[str, int, str]  # kind, index and pool of a forward


class SubstepCanary:
    """One forward of one pool; the manager hands it out."""

    __slots__ = (
        *("_expected", "_pool", "_session", "_where"),
        *("_forward", "_is_judged", "_num_layers", "_phase", "_puts", "_shapes"),
        *("_geometry", "_k_step", "_loop", "_slots", "_slots_step", "_v_step"),  # what `put` asked of the last layer
    )

    def __init__(self, session: Session, expected: ExpectedForwards, kind: str, index: int, pool: PoolState) -> None:
        self._session, self._expected, self._pool, self._where = session, expected, pool, (kind, index, pool)
        self._num_layers = pool.full_layers.bit_length()
        self._phase, self._is_judged, self._puts = NEW, True, False
        self._forward: Forward
        self._shapes: list[tuple[int, ...]] | None = None
        self._slots: Tensor | None = None
        self._geometry: tuple[object, ...] = ()

    def __str__(self) -> str:
        kind, index, pool = self._where
        return f"{site_name(kind, index)} of the {pool.name} pool"

    def open(self, read: ReadPlan, write: WritePlan) -> tuple[Tensor, Tensor]:
        """Judge both plans before the body runs; give (indices, slots) that are safe to use.

        What is refused is replaced by null slot 0 and reported: ids outside the pool (R1, W1), and slots that the
        entry's request must not write (W2, W3, W7, W8). Plans that contradict themselves are a ContradictionError, in
        modes that end nobody for it an L1, and the forward is not judged.
        """
        if self._phase != NEW:
            raise HookOrderError(f"open() comes once: {self} is {self._phase}")
        if self._session.ledger.book.has_spans:
            write = self._as_admitted(read, write)
        try:
            safe = self._take(read, write)
        except ENGINES_DOING as error:
            if self._session.follow is None:
                raise
            replaced = self._session.follow(error, self._where, read, write)
            if replaced is None:
                return self.open(read, write)
            kind, index, pool = self._where
            self._expected.opened((kind, index, pool.name), self._session.step)
            safe, self._is_judged = replaced, False
        self._session.open.append(self._where)
        self._phase = OPEN
        return safe

    def _take(self, read: ReadPlan, write: WritePlan) -> tuple[Tensor, Tensor]:
        session, (kind, index, pool) = self._session, self._where
        forward = Forward(kind, index, pool, session.step, self._requests_of(read), read, write)
        violations: Sequence[Violation | ViolationBatch] = ()
        if not forward.is_usable:
            violations = refuse(forward, session.ledger.pages, session.config.disable)
        is_announced = self._expected.opened((kind, index, pool.name), session.step)
        if not is_announced and kind == "draft":
            violations = [*violations, *self._expected.left_out(forward)]
        session.checks.open(forward)
        session.recorder.forwards.opened(forward)
        session.checks.report(violations)
        self._forward, self._loop, self._puts = forward, pool.loops.put_values, True
        return forward.indices, forward.slots

    def _as_admitted(self, read: ReadPlan, write: WritePlan) -> WritePlan:
        """With ids of spans in the place of their tokens, where a row may still write some."""
        requests, pool = self._session.ledger.requests, self._pool
        rows, offset = [requests[name] for name in read.requests if name in requests], pool.view.token_offset
        ends = [0 if row.given is None else len(row.given) - offset - row.row_lens[pool.pool_id] for row in rows]
        if len(rows) < len(read.requests) or max(ends, default=0) <= 0:
            return write
        known = [(row.tokens if row.given is None else row.given, row.tokens) for row in rows]
        return as_admitted(write, read, known, offset)

    def _requests_of(self, read: ReadPlan) -> list[Request]:
        """It is judged by what the host knows now: by all that was accepted for its requests, too."""
        requests, checks = self._session.ledger.batches[tuple(read.requests)].requests, self._session.checks
        is_behind = checks.captured is not None and checks.captured.num_pending_acceptances > 0
        if is_behind and any(request.pending_acceptances for request in requests):
            checks.collect()
        return requests

    def put(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None, *extras: Tensor) -> bool:
        """Store what this layer stores at `slots` [n], instead of the engine; False: it must, and tell `store`.

        k, v: [n, kv_heads, head_dim], in the order of the write plan, whatever the pool's layout
        Nothing was done where the pool is on a device or holds more than K and V, values are no dense rows of its
        types, or slots are not those that were planned. What was found of one layer's tensors is asked again only
        where those of the next are different.
        """
        if v is None or extras or not self._puts:
            return False
        geometry = k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype, k.is_cpu and v.is_cpu
        forward, pool = self._forward, self._pool
        if geometry != self._geometry:
            steps = None if pool.host is None else pool.host.steps[geometry]
            if steps is None or k.shape[0] != forward.num_entries:
                return False
            self._geometry, (self._k_step, self._v_step) = geometry, steps
        if slots is not self._slots:
            if not slots.is_cpu or slots.dtype is not torch.int64 or slots.shape != (forward.num_entries,):
                return False
            self._slots, self._slots_step = slots, slots.stride(0)
        bit, at, k_step, v_step = pool.bit_of(layer, 0), slots.data_ptr(), self._k_step, self._v_step
        if not bit or forward.stored & bit:
            return False
        if not self._loop(forward.head, layer, at, self._slots_step, k.data_ptr(), k_step, v.data_ptr(), v_step):
            return False
        forward.stored |= bit
        return True

    def store(self, layer: int, k: Tensor, v: Tensor | None = None, *extras: Tensor) -> None:
        """The values that this layer stores, in the order of the write plan, whatever the pool's layout.

        k, v: [n, kv_heads, head_dim], v None for latent rows; extras: [n, ...] of one slot's shape
        """
        if self._phase != OPEN:
            raise HookOrderError(f"store(layer={layer}) belongs between open() and close(): {self} is {self._phase}")
        if not self._is_judged:
            return
        if not 0 <= layer < self._num_layers:
            raise PlanError(f"layer must be in [0, {self._num_layers}) for {self}, got {layer}")
        if v is not None and not extras:  # most pools, and faster than the loop
            values: tuple[Tensor, ...] = (k, v)
            shapes = [k.shape, v.shape]
        else:
            values = (k, *extras) if v is None else (k, v, *extras)
            shapes = [value.shape for value in values]
        if self._shapes is None:
            self._shapes = self._pool.view.value_shapes(self._forward.num_entries)
        if shapes != self._shapes:
            raise PlanError(f"{self} {wrong_values(self._pool.view, self._forward.num_entries, values)}")
        forward = self._forward
        if forward.stored >> layer & 1:
            self._session.recorder.forwards.stored_again(self._pool.name, layer)
            self._session.checks.report(judge_layer(forward, layer))
        forward.stored |= 1 << layer
        forward.stored_by_engine = True
        if forward.fingerprints is not None:
            take_fingerprints(forward, forward.fingerprints, layer, values)

    def close(self) -> None:
        """The body has run."""
        if self._phase != OPEN:
            raise HookOrderError(f"close() follows open(): {self} is {self._phase}")
        self._phase, self._puts = CLOSED, False
        if self._is_judged:
            self._session.recorder.forwards.closed(self._pool.name)
        self._session.open.remove(self._where)


class WarmupSubstep:
    """The hooks before `arm()`: they pass everything through and check nothing."""

    def open(self, read: ReadPlan, write: WritePlan) -> tuple[Tensor, Tensor]:
        return read.indices, write.slots

    def put(self, layer: int, slots: Tensor, k: Tensor, v: Tensor, *extras: Tensor) -> bool:
        """The engine stores by itself."""
        return False

    def store(self, layer: int, k: Tensor, v: Tensor | None = None, *extras: Tensor) -> None:
        """Warm-up values are not kept."""

    def close(self) -> None:
        """The body has run."""


class ExpectedForwards:
    """Forwards that were announced and have not opened their hooks, and the last ones that have.

    due: in the order of their run: the forward, the step in which it was announced, and whose rows it has
    """

    def __init__(self, pools: Mapping[str, PoolState]) -> None:
        self.due: list[tuple[Announced, int, Sequence[str]]] = []
        self._pools, self._known = pools, set[Announced]()
        self._opened: deque[tuple[Announced, int]] = deque(maxlen=MOST_NAMED)
        self._drafted: dict[tuple[str, int], tuple[int, int]] = {}  # see `left_out`

    def announce(self, forwards: Sequence[Announced], step: int, request_ids: Sequence[str]) -> None:
        """These run next. PlanError for a kind or pool that there is not."""
        if not self._known.issuperset(forwards):
            for kind, _, pool in forwards:
                if kind not in SUBSTEP_KINDS:
                    raise unknown_kind(kind)
                if pool not in self._pools:
                    raise PlanError(f"pool must be one of {', '.join(self._pools)}, got {pool!r}")
            self._known.update(forwards)
        self.due += zip(forwards, repeat(step), repeat(request_ids))

    def opened(self, forward: Announced, step: int) -> bool:
        """This one has opened its hooks; whether it was announced."""
        self._opened.append((forward, step))
        for number, (announced, *_) in enumerate(self.due):
            if announced == forward:
                del self.due[number]
                return True
        return False

    def missing(self) -> list[Violation]:
        """H1 for each that is due: it has run without hooks, or not at all. It is due no more."""
        due, self.due = self.due, []
        return [self._without_hooks(*one) for one in due]

    def left_out(self, forward: Forward) -> list[Violation]:
        """H1 for draft forwards that must have run before this one, where the engine announces nothing.

        Those of one loop are numbered from 0 on, by the ancestors that their rows read, behind the same final entries.
        """
        if self._known:
            return []
        numbers, own = range(0), min(forward.index, own_number(forward))
        for request, prefix in zip(forward.requests, forward.prefixes, strict=True):
            place = forward.pool.name, request.uid
            before, following = self._drafted.get(place, (prefix, 0))
            numbers = max(numbers, range(following if before == prefix else 0, own), key=len)
            self._drafted[place] = prefix, own + 1
        lost = [("draft", number, forward.pool.name) for number in numbers]
        return [self._without_hooks(one, forward.step, forward.request_ids) for one in lost]

    def forget(self, uid: int) -> None:
        """The request is over."""
        for name in self._pools if self._drafted else ():
            self._drafted.pop((name, uid), None)

    # helpers

    def _without_hooks(self, forward: Announced, step: int, request_ids: Sequence[str]) -> Violation:
        kind, index, pool = forward
        opened = [_name(one) for one, when in self._opened if when == step]
        violation = Violation(
            "H1", self._pools[pool], NO_SLOT, None, next(iter(request_ids), None), (kind, index), step, is_unhooked=True
        )
        violation.others = tuple(request_ids[1:])
        violation.expected, violation.found = {"opened": _name(forward)}, {"opened": opened or ["nothing"]}
        return violation


def _name(forward: Announced) -> str:
    kind, index, pool = forward
    return f"{site_name(kind, index)} ({pool})"


def unknown_kind(kind: str) -> PlanError:
    return PlanError(f"kind must be one of {', '.join(SUBSTEP_KINDS)}, got {kind!r}")
