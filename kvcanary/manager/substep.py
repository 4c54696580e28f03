"""SubstepCanary: the hooks of one forward, in the only order that makes sense: open, store of each layer, close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from kvcanary.calls.forward import Forward
from kvcanary.calls.violation import Violation
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.captured.one_shot import OneShotSubstep
from kvcanary.checks.stores import Store, leave_it, take_fingerprints
from kvcanary.checks.writes import judge_layer
from kvcanary.errors import ENGINES_DOING, ContradictionError, HookOrderError, LifetimeError, PlanError
from kvcanary.ledger.ledger import Request
from kvcanary.pools.launch_site import site_name
from kvcanary.pools.plans import (
    ReadPlan,
    WritePlan,
    wrong_values,
)
from kvcanary.recorder.recorder import Recorder
from kvcanary.records.state import PoolState

NEW, OPEN, CLOSED = "not opened", "open", "closed"
Refusal = LifetimeError | ContradictionError  # of a plan


class Owner(Protocol):
    """Who has handed a substep out: what its hooks ask of the manager."""

    recorder: Recorder

    @property
    def step(self) -> int: ...

    def requests_of(self, request_ids: Sequence[str]) -> list[Request]: ...

    def opened(self, substep: SubstepCanary, forward: Forward) -> None: ...

    def refused_plan(
        self, substep: SubstepCanary, error: Refusal, read: ReadPlan, write: WritePlan
    ) -> tuple[Tensor, Tensor] | None: ...

    def report_violations(self, violations: Sequence[Violation | ViolationBatch]) -> None: ...

    def closed(self, substep: SubstepCanary, pool: PoolState, is_judged: bool = True) -> None: ...

    def launch_eager(
        self,
        substep: SubstepCanary,
        site: tuple[str, int],
        pool: PoolState,
        read: ReadPlan,
        write: WritePlan,
        requests: list[Request],
        written: list[int],
    ) -> OneShotSubstep: ...


class SubstepCanary:
    """One forward of one pool; the manager hands it out.

    put: between open and close `stores.Store.put`, by which the canary stores a layer instead of the engine
    """

    __slots__ = (
        *("_forward", "_index", "_is_judged", "_kind", "_manager", "_num_layers", "_phase", "_pool", "_shapes"),
        "put",
    )

    def __init__(self, manager: Owner, kind: str, index: int, pool: PoolState) -> None:
        self._manager, self._kind, self._index, self._pool = manager, kind, index, pool
        self._num_layers = pool.full_layers.bit_length()
        self._phase, self._is_judged = NEW, True
        self._forward: Forward
        self._shapes: list[tuple[int, ...]] | None = None
        self.put: Callable[..., bool] = leave_it

    def __str__(self) -> str:
        return f"{site_name(self._kind, self._index)} of the {self._pool.name} pool"

    @property
    def site(self) -> tuple[str, int]:
        return self._kind, self._index

    @property
    def pool_name(self) -> str:
        return self._pool.name

    def is_same_forward(self, kind: str, index: int, pool: PoolState) -> bool:
        """Whether that is the same forward in a pool of another group: both may be open at once."""
        return (kind, index) == (self._kind, self._index) and pool.view.group != self._pool.view.group

    def open(self, read: ReadPlan, write: WritePlan) -> tuple[Tensor, Tensor]:
        """Judge both plans before the body runs; give (indices, slots) that are safe to use.

        What is refused is replaced by null slot 0 and reported: ids outside the pool (R1, W1), and slots that the
        entry's request must not write (W2, W3, W7, W8). Plans that contradict themselves are a ContradictionError, in
        modes that end nobody for it an L1, and the forward is not judged.
        """
        if self._phase != NEW:
            raise HookOrderError(f"open() comes once: {self} is {self._phase}")
        try:
            safe = self._take(read, write)
        except ENGINES_DOING as error:
            replaced = self._manager.refused_plan(self, error, read, write)
            if replaced is None:
                return self.open(read, write)
            safe, self._is_judged = replaced, False
        self._phase = OPEN
        return safe

    def _take(self, read: ReadPlan, write: WritePlan) -> tuple[Tensor, Tensor]:
        manager, pool = self._manager, self._pool
        requests = manager.requests_of(read.requests)
        forward = Forward(self._kind, self._index, pool, manager.step, requests, read, write)
        manager.opened(self, forward)
        self._forward = forward
        self.put = Store(forward).put
        return forward.indices, forward.slots

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
            self._manager.recorder.stored_again(self._pool.name, layer)
            self._manager.report_violations(judge_layer(forward, layer))
        forward.stored |= 1 << layer
        forward.stored_by_engine = True
        if forward.fingerprints is not None:
            take_fingerprints(forward, forward.fingerprints, layer, values)

    def close(self) -> None:
        """The body has run."""
        if self._phase != OPEN:
            raise HookOrderError(f"close() follows open(): {self} is {self._phase}")
        self._phase, self.put = CLOSED, leave_it
        self._manager.closed(self, self._pool, self._is_judged)


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
