"""Host tier: pages that leave the pools for host memory and come back, instead of being computed again.

What an engine does, and what the canary is told from here (*):

offload   ``block = tier.offload(pages, length)``         * on_offload: the block keeps the canary's parcel
          ``tier.wait(block)``, and only then ``canary.on_free`` or ``on_evict`` and ``allocator.free``
restore   ``allocator.allocate``, ``canary.on_alloc(request, pages, for_load=True)``
          ``load = tier.restore(block, request, pages)``  * on_load_begin: to read these pages is R12; prepare_load
          ``tier.finish(load)`` before the forward        * on_load_end with the snapshot: T1 where bytes have changed
          ``canary.commit(request, block.length)``
or        LoadFailedError from ``finish``, or ``tier.cancel(load)``: * on_load_fail; the pages may be written or freed
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary import KVCanaryError
from kvcanary.invariants import check_host_block, check_host_capacity, check_pool_slots
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.host_rows import HostRows, slots_of
from spec_engine.memory.pools.pool import KVPool
from spec_engine.step.streams import Event, Streams

if TYPE_CHECKING:
    from kvcanary import CanaryManager
    from kvcanary.transfers import PageSnapshot

STREAM = "host tier"


class LoadFailedError(KVCanaryError, RuntimeError):
    """Bytes did not come back from the host; their pages hold nothing, the request is to be computed again."""


@dataclass(frozen=True, eq=False)
class HostBlock:
    """Whole pages in host memory.

    places: pages of the tier, in the order of the pages that were offloaded
    length: what was final of the row, in entries from its begin on
    event:  the end of the copy to the host; the pages must stay as they are until then
    """

    number: int
    places: tuple[int, ...]
    length: int
    event: Event
    snapshot: PageSnapshot | None

    def __str__(self) -> str:
        return f"host block {self.number}"


@dataclass(eq=False)
class Load:
    """A block on its way back into ``pages`` of a request; ``error`` is why it did not arrive."""

    block: HostBlock
    request_id: str
    pages: tuple[int, ...]
    event: Event = field(init=False)
    error: Exception | None = None

    @property
    def places(self) -> tuple[int, ...]:
        """Pages of the tier that come back: the last ones of the block."""
        return self.block.places[-len(self.pages) :]

    @cached_property
    def snapshot(self) -> PageSnapshot | None:
        snapshot = self.block.snapshot
        return None if snapshot is None else snapshot.behind(len(self.block.places) - len(self.pages))


class HostTier:
    """Blocks of pages of all pools that share slots, the least recently used given up first.

    All copies run on one side stream: a place that is given up is written again only behind what still reads it.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        num_pages: int,
        streams: Streams,
        canary: CanaryManager | None = None,
        slot_maps: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """``slot_maps``: by name of a pool whose slots are its own, its map; null slots travel for what it lacks.

        generations: [num_pages + 1] int64, by place the number of the block that lies there, 0: none
        """
        self.num_pages = num_pages
        self._page_size = pools[0].page_size
        self._rows = [HostRows(pool, (num_pages + 1) * self._page_size) for pool in pools]
        for pool, rows in zip(pools, self._rows, strict=True):
            for part in rows.parts:
                check_pool_slots(f"{pool.name} on the host", part.shape[0], num_pages, self._page_size)
        self._maps = [slot_maps.get(pool.name) for pool in pools]
        self._places = PageAllocator(num_pages)
        self._blocks: OrderedDict[int, HostBlock] = OrderedDict()  # least recently used first
        self._pinned: set[int] = set()  # numbers of blocks that are evicted for nobody
        self._reserved: set[int] = set()  # places into which bytes come from elsewhere
        self._number = 0
        self.generations = torch.zeros(num_pages + 1, dtype=torch.int64)
        self._streams, self._canary = streams, canary

    @property
    def num_free(self) -> int:
        return self._places.num_free

    @property
    def num_obtainable(self) -> int:
        """Places that are free, or would be if other blocks were evicted."""
        return self.num_pages - len(self._reserved) - sum(len(self._blocks[own].places) for own in self._pinned)

    @property
    def parts(self) -> list[Tensor]:
        """Memory of the places: of each part of each pool [(num_pages + 1) * page_size, layers, ...]."""
        return [part for rows in self._rows for part in rows.parts]

    def holds(self, block: HostBlock) -> bool:
        """Whether the block may still be restored: it was neither dropped nor evicted for another."""
        return block.number in self._blocks

    def offload(self, pages: Sequence[int], length: int) -> HostBlock:
        """Copy pages of all pools to the host, in row order; HostCapacityError where they never fit.

        ``length``: entries of the row that are final, those on other pages included. Old blocks are evicted to make
        room.
        """
        places = self._take(len(pages))
        snapshot = None if self._canary is None else self._canary.on_offload(pages)
        slots, rows = self._own_slots(pages), slots_of(places, self._page_size)
        side = self._streams.behind_main(STREAM)
        event = side.submit("offload", lambda: self._save(slots, rows), reads=pages, writes=names_of(places))
        return self._keep(places, length, event, snapshot)

    def wait(self, block: HostBlock) -> None:
        """The host waits for the copy to the host: the pages that it reads may be freed."""
        self._streams.host.wait(block.event)

    def restore(self, block: HostBlock, request_id: str, pages: Sequence[int], first: int = 0) -> Load:
        """Copy a block back into pages of a request, which may be read after ``finish``.

        first: pages at the begin of the block that need not come back, since a prefix cache has them.
        HostBlockError where the block is gone, or is not of so many pages.
        """
        check_host_block(str(block), self.holds(block), len(block.places) - first, len(pages))
        self._blocks.move_to_end(block.number)
        if self._canary is not None:
            self._canary.on_load_begin(request_id, pages)
        load, slots = Load(block, request_id, tuple(pages)), self._own_slots(pages)
        side, reads = self._streams.behind_main(STREAM), names_of(load.places)
        side.use("restore", reads, requests=(request_id,))
        load.event = side.submit("restore", lambda: self._load(load, slots), reads=reads, writes=pages)
        if self._canary is not None and load.snapshot is not None:
            self._canary.prepare_load(request_id, pages, block.length, load.snapshot)
        return load

    def finish(self, load: Load) -> None:
        """The forwards that come now may read the pages; LoadFailedError where the bytes did not arrive."""
        self._streams.main.wait(load.event)
        if load.error is not None:
            self._fail(load)
            raise LoadFailedError(
                f"{load.block} for {load.request_id!r} did not arrive in pages {list(load.pages)}, {load.error}: "
                "free the pages and compute the request again"
            ) from load.error
        if self._canary is not None:
            self._canary.on_load_end(load.request_id, load.pages, load.block.length, load.snapshot)

    def cancel(self, load: Load) -> None:
        """Nobody wants the bytes any more: the host waits for the copy, then the pages may be freed."""
        self._fail(load)

    def drop(self, block: HostBlock) -> None:
        """The block is not needed any more; its places are free."""
        check_host_block(str(block), self.holds(block), len(block.places), len(block.places))
        del self._blocks[block.number]
        self._pinned.discard(block.number)
        self._free(block.places)

    # bytes that come from another engine, or that another engine comes for

    def pin(self, block: HostBlock) -> None:
        """Somebody elsewhere may read it: until it is dropped it is evicted for nobody."""
        self._pinned.add(block.number)

    def reserve(self, count: int) -> tuple[int, ...]:
        """Places for bytes on their way from elsewhere; HostCapacityError where they do not fit now."""
        places = self._take(count)
        self._reserved.update(places)
        return places

    def give_back(self, places: Sequence[int]) -> None:
        """Nothing is on its way to these reserved places any more, and nobody needs what came."""
        self._reserved.difference_update(places)
        self._free(places)

    def adopt(self, places: Sequence[int], length: int, event: Event, snapshot: PageSnapshot | None) -> HostBlock:
        """Bytes have arrived in places that were reserved: a block like one that was offloaded here."""
        self._reserved.difference_update(places)
        return self._keep(tuple(places), length, event, snapshot)

    def check_accounting(self) -> None:
        """PageLeakError unless free places and those of the blocks are the whole tier."""
        held = sum(len(block.places) for block in self._blocks.values())
        self._places.check_accounting(held + len(self._reserved))

    def _take(self, count: int) -> tuple[int, ...]:
        """Free places; blocks are evicted to make room, but none that is pinned."""
        check_host_capacity(count, self.num_obtainable)
        while self.num_free < count:
            self.drop(next(block for number, block in self._blocks.items() if number not in self._pinned))
        return tuple(self._places.allocate(count))

    def _keep(self, places: tuple[int, ...], length: int, event: Event, snapshot: PageSnapshot | None) -> HostBlock:
        self._number += 1
        block = self._blocks[self._number] = HostBlock(self._number, places, length, event, snapshot)
        self.generations[list(places)] = self._number
        return block

    def _free(self, places: Sequence[int]) -> None:
        self.generations[list(places)] = 0
        self._places.free(places)

    def _own_slots(self, pages: Sequence[int]) -> list[Tensor]:
        """By pool the slots of these pages, where it has them now."""
        slots = slots_of(pages, self._page_size)
        return [slots if slot_map is None else slot_map[slots.to(slot_map.device)] for slot_map in self._maps]

    def _save(self, slots: Sequence[Tensor], rows: Tensor) -> None:
        for host, own in zip(self._rows, slots, strict=True):
            host.save(own, rows)

    def _load(self, load: Load, slots: Sequence[Tensor]) -> None:
        """What goes wrong here is the load's own affair: other work of the stream goes on."""
        places = slots_of(load.places, self._page_size)
        try:
            for host, own in zip(self._rows, slots, strict=True):
                host.load(places, own)
        except (RuntimeError, OSError) as error:
            load.error = error

    def _fail(self, load: Load) -> None:
        """Nothing is on its way to these pages any more, and nothing is known to lie there."""
        self._streams.host.wait(load.event)
        if self._canary is not None:
            self._canary.on_load_fail(load.request_id, load.pages)


def names_of(places: Sequence[int]) -> list[str]:
    """What the canary calls pages of the tier."""
    return [f"host page {place}" for place in places]
