"""Device state: the records of all pools in one tensor, fingerprints of each, and what is true of every page."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.ledger.page_states import Pages
from kvcanary.native.layout import POOL
from kvcanary.pools.aliasing import first_overlap
from kvcanary.pools.slot_maps import check_groups, full_group_slots
from kvcanary.pools.views import PoolView
from kvcanary.records.host_pool import HostPool, pool_struct
from kvcanary.records.mailbox import to_device
from kvcanary.records.page_updates import PageUpdates
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.formats import lanes_of
from kvcanary_kernels.record.layout import Keys, bitmap_columns, chain_root, layers_bitmap, make_keys, signed
from kvcanary_kernels.record.seal import seal_offset, seal_torch


class PoolState:
    """One pool: what the engine gave, and what the canary keeps beside it; only where it lies may change.

    base:       row of its slot 0 in the records of all pools
    root:       chain value that position 0 continues, unsigned
    records:    [num_slots, 8] int64, a view of the records of all pools
    expected:   [num_slots, 8] int64, the same records as the canary wrote them: any difference is damage
    content_a:  [layers, num_slots] int64
    seal_term:  what this pool adds to the seal of its records' rows, unsigned: the number of the pool, and slots
                count from its base
    full_layers, all_layers: bitmap of all layers; the same as the two columns of a record, signed
    host:       the same for the compiled loops; None on a GPU
    loops:      the compiled loops, loaded with the first pool
    asks_finite: whether what is stored must be finite (N1)
    lanes:      by which the words of a row tell that (record/formats.py)
    seen:       [num_slots] bool, all False: a loop's own
    is_gone:    its memory is nobody's: nothing is read there;  cleared_in: step in which its bytes went last
    struct:     POOL, the same for loops that read by address (native/layout.py); `struct_at`: its address
    """

    is_gone = False
    cleared_in: int | None = None

    def __init__(self, view: PoolView, pool_id: int, base: int, seed: int, records: Tensor, expected: Tensor) -> None:
        """`records`, `expected`: those of all pools, zeros here."""
        from kvcanary.native import loops

        keys = make_keys(seed, view.num_layers, view.rows.words_per_row, records.device, view.share)
        self.view, self.pool_id, self.keys, self.base = view, pool_id, keys, base
        self.rows, self.root = view.rows, chain_root(keys, view.root_name)
        self.records, self.expected = (values[base : base + view.num_slots] for values in (records, expected))
        _seal_as_never_written(self.records, pool_id, keys)
        self.expected.copy_(self.records)
        self.content_a = torch.zeros(view.num_layers, view.num_slots, dtype=torch.int64, device=records.device)
        self.layers, self.full_layers = layers_bitmap(view.num_layers, records.device), (1 << view.num_layers) - 1
        self.all_layers = low, high = stored_columns(self.full_layers)
        self.bit_of: Callable[[int, int], int] = {layer: 1 << layer for layer in range(view.num_layers)}.get
        self.seal_term, self.loops = seal_offset(keys, pool_id, base), loops
        own = keys, self.content_a, self.records, self.expected
        self.host = HostPool(view, *own) if records.is_cpu else None
        self.seen: NDArray[np.bool_] = np.zeros(view.num_slots, np.bool_)
        numbers = {"pool_id": pool_id, "base": base, "seal_term": signed(self.seal_term)}
        self.struct = pool_struct(view, self.host, self.seen, low_layers=low, high_layers=high, **numbers)
        self.asks_finite = True
        self.struct_at: int = self.struct.ctypes.data

    def write_fingerprints(self, slots: Tensor, fingerprint_a: Tensor, fingerprint_b: Tensor) -> None:
        """Fingerprints [layers, n] and [n] of these slots, [n] distinct; their records must be sealed."""
        self.content_a.index_copy_(1, slots, fingerprint_a)
        for records in (self.records, self.expected):
            records.select(1, record.CONTENT_B).index_copy_(0, slots, fingerprint_b)

    @property
    def asks_finite(self) -> bool:
        return bool(self.struct[POOL.asks_finite])

    @asks_finite.setter
    def asks_finite(self, value: bool) -> None:
        self.struct[POOL.asks_finite] = value

    @cached_property
    def lanes(self) -> tuple[Tensor, ...]:
        return lanes_of(self.rows)

    @property
    def name(self) -> str:
        return self.view.name

    @property
    def is_partial(self) -> bool:
        """Whether rows may begin behind position 0, or a slot map may change under them: all is judged each time."""
        return self.view.slot_map is not None or self.view.window is not None


class CanaryState:
    """Everything that is allocated once, when the canary is attached."""

    def __init__(self, views: Sequence[PoolView], seed: int) -> None:
        _check_pools(views)
        device = views[0].device
        self.page_size = views[0].page_size
        self.num_slots = max(view.num_slots for view in views)
        num_pages = max(-(-full_group_slots(views) // self.page_size), max(view.num_pages for view in views))
        total = sum(view.num_slots for view in views)
        with torch.inference_mode(False):
            self.records = torch.zeros(total, record.COLUMNS, dtype=torch.int64, device=device)
            self.expected = torch.zeros_like(self.records)
            self._page_truth = torch.zeros(3, num_pages, dtype=torch.int64, device=device)
            self.generations, self.owners, self.page_states = self._page_truth
            self._deltas = PageUpdates(self._page_truth)
            self.owners.fill_(record.NO_OWNER)
            self.page_states.fill_(record.FREE)
            self.arange = torch.arange(self.num_slots + 1, device=device)
            bases = accumulate((view.num_slots for view in views), initial=0)
            self.pools = tuple(
                PoolState(view, number, base, seed, self.records, self.expected)
                for number, (view, base) in enumerate(zip(views, bases, strict=False))
            )
        self.by_name = {pool.name: pool for pool in self.pools}
        self.keys = self.pools[0].keys  # seal, mix and chain keys are the same in all
        self._host_pages = [column.numpy() for column in self._page_truth] if self.records.is_cpu else []

    @property
    def num_bytes(self) -> int:
        """What the canary keeps beside the pools, in bytes."""
        tensors = self.records, self.expected, self._page_truth, *(pool.content_a for pool in self.pools)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def judges_on_device(self) -> bool:
        """Whether forwards may judge themselves: on a GPU, where all rows of all pools lie as plans name them."""
        return self.records.is_cuda and not any(pool.is_partial for pool in self.pools)

    def pools_of(self, group: str | None) -> list[PoolState]:
        """Those of a group behind a slot map; None: all pools whose slots plans name."""
        return [pool for pool in self.pools if (None if pool.view.slot_map is None else pool.view.group) == group]

    def ints(self, values: Iterable[int]) -> Tensor:
        """[n] int64 on the device of the state."""
        buffer = array("q", values)
        if not buffer:
            return self.arange[:0]
        return to_device(torch.frombuffer(buffer, dtype=torch.int64), self.arange.device)

    def page_truth(self, pool: PoolState, slots: Tensor, names: Tensor) -> dict[str, Any]:
        """What is true of the pages behind these slots, as `verify` takes it: generations, states, owners, page_size.

        names: [n] int64, what plans call the slots; behind a slot map every slot counts as a page of its own
        """
        columns = {"generations": self.generations, "states": self.page_states, "owners": self.owners}
        size = self.page_size
        if pool.view.slot_map is None:
            return {name: values[: pool.view.num_pages] for name, values in columns.items()} | {"page_size": size}
        spread = {name: values.new_zeros(pool.view.num_slots) for name, values in columns.items()}
        for name, values in columns.items():
            spread[name].index_copy_(0, slots, values.index_select(0, names // size))
        return spread | {"page_size": 1}

    def bind(self, pages: Pages) -> None:
        """Loops that look through plans know these pages from now on; behind a slot map plans are read by the rules."""
        self._pages = pages  # whose arrays stay where they are
        for pool in self.pools:
            if pool.view.slot_map is None:
                pool.struct[POOL.writers] = pages.writers.ctypes.data

    def publish(self, pages: Pages) -> None:
        """What has happened to pages since the last time is true from now on."""
        if not pages.changed:
            return
        where = pages.changes()
        if self._host_pages:
            own = pages.generations, pages.owners, pages.states
            self.pools[0].loops.publish_pages(where, *own, *self._host_pages)
        else:
            self._deltas.send(len(where), partial(self.pools[0].loops.describe_pages, pages.struct_at, where))


def stored_columns(layers: int) -> tuple[int, int]:
    """`bitmap_columns` as signed numbers."""
    low, high = bitmap_columns(layers)
    return signed(low), signed(high)


def _seal_as_never_written(records: Tensor, pool_id: int, keys: Keys) -> None:
    """Generation 0 is never granted: a slot that nobody has written is R12, a zeroed record R3."""
    slots = torch.arange(records.shape[0], device=records.device)
    zero = torch.zeros_like(slots)
    never: dict[str, Any] = {"tokens": zero, "positions": zero, "chains": zero}
    never |= dict.fromkeys(("requests", "generations", "step", "sites"), zero[:1])
    seal_torch(records, slots, **never, pool_id=pool_id, keys=keys)


def _check_pools(views: Sequence[PoolView]) -> None:
    if not views:
        raise PlanError("a manager needs at least one pool")
    names = [view.name for view in views]
    if len(set(names)) != len(names):
        raise PlanError(f"pools must have different names, got {', '.join(names)}")
    for view in views[1:]:
        if view.page_size != views[0].page_size:
            raise PlanError(
                f"pools share page ids, so page_size must be one: {names[0]!r} has {views[0].page_size}, "
                f"{view.name!r} has {view.page_size}"
            )
        if view.device != views[0].device:
            raise PlanError(
                f"pools of a manager lie on one device: {names[0]!r} is on {views[0].device}, "
                f"{view.name!r} on {view.device}"
            )
    check_groups(views)
    _check_memory(views)


def _check_memory(views: Sequence[PoolView]) -> None:
    """Pools that share slots share no bytes; groups may lie in the same memory, since their pages never do."""
    for group in {view.group for view in views}:
        own = [view for view in views if view.group == group]
        owned = [(f"{name} of {view.name!r}", words) for view in own for name, words in view.memory()]
        overlap = first_overlap(owned)
        if overlap is not None:
            raise PlanError(f"{overlap[0]} and {overlap[1]} share memory: watch it as one pool")
