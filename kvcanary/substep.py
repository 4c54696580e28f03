"""SubstepCanary: the hooks of one forward, in the only order that makes sense: open, store of each layer, close."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvcanary.errors import HookOrderError, PlanError
from kvcanary.forward import Forward, plan_forward
from kvcanary.hits import Hit
from kvcanary.lanes import lanes_of_layer
from kvcanary.sites import site_name
from kvcanary.state import PoolState
from kvcanary.views import ReadPlan, WritePlan
from kvcanary.writing import judge_writes

if TYPE_CHECKING:
    from kvcanary.manager import CanaryManager

KEPT_ENTRIES = 256  # values of longer forwards are fingerprinted layer by layer, not kept until the check
NEW, OPEN, CLOSED = "not opened", "open", "closed"


class SubstepCanary:
    """One forward of one pool; the manager hands it out."""

    __slots__ = ("_dtype", "_forward", "_index", "_kind", "_manager", "_phase", "_pool", "_row_numel")

    def __init__(self, manager: CanaryManager, kind: str, index: int, pool: PoolState) -> None:
        self._manager, self._kind, self._index, self._pool = manager, kind, index, pool
        self._dtype, self._row_numel = pool.view.dtype, pool.view.kv_heads * pool.view.head_dim
        self._phase = NEW
        self._forward: Forward

    def __str__(self) -> str:
        return f"{site_name(self._kind, self._index)} of the {self._pool.name} pool"

    def open(self, read: ReadPlan, write: WritePlan) -> tuple[Tensor, Tensor]:
        """Judge both plans before the body runs; give (indices, slots) that are safe to use.

        Ids outside the pool are refused: they are replaced by null slot 0, and reported as R1 or W1.
        """
        if self._phase != NEW:
            raise HookOrderError(f"open() comes once: {self} is {self._phase}")
        manager, pool = self._manager, self._pool
        manager.opening(self._kind, pool)
        requests, paths = manager.requests_of(read.requests), manager.paths_of(pool)
        forward = plan_forward(self._kind, self._index, pool, manager.step, requests, read, write, paths)
        hits = judge_writes(forward, manager.config.disable)
        self._forward, self._phase = forward, OPEN
        manager.opened(self, forward, hits)
        return forward.indices, forward.slots

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """The values that this layer stores, [n, kv_heads, head_dim] in the order of the write plan."""
        if self._phase != OPEN:
            raise HookOrderError(f"store(layer={layer}) belongs between open() and close(): {self} is {self._phase}")
        forward, dtype = self._forward, self._dtype
        if not 0 <= layer < len(forward.k):
            raise PlanError(f"layer must be in [0, {len(forward.k)}) for {self}, got {layer}")
        if forward.k[layer] is not None or layer in forward.lanes:
            self._manager.report_hits(_stored_twice(forward, layer))
        if k.dtype is not dtype or v.dtype is not dtype:
            k, v = k.to(dtype), v.to(dtype)
        n = len(forward.write_slots)
        if k.shape[0] != n or k.numel() != n * self._row_numel or v.shape != k.shape:
            heads, dim = self._pool.view.kv_heads, self._pool.view.head_dim
            wanted = [n, heads, dim]
            raise PlanError(f"{self} stores {wanted} a layer, got k {list(k.shape)} and v {list(v.shape)}")
        if n > KEPT_ENTRIES:
            forward.lanes[layer] = lanes_of_layer(self._pool, layer, k, v)
        else:
            forward.k[layer], forward.v[layer] = k, v

    def close(self) -> None:
        """The body has run."""
        if self._phase != OPEN:
            raise HookOrderError(f"close() follows open(): {self} is {self._phase}")
        self._phase = CLOSED
        self._manager.closed()


def _stored_twice(forward: Forward, layer: int) -> list[Hit]:
    """W4 at the first slot of the forward: the layer's bitmap is set already."""
    if not forward.write_slots:
        return []
    position, request_id = forward.write_positions[0], forward.requests[0].request_id
    slot = forward.write_slots[0]
    return [Hit("W4", forward.pool, slot, position, request_id, forward.site, forward.step, layers=(layer,))]
