"""Split pool: the target's K and V lie partly on the device and partly on the host, behind a map of the full slots.

Requests, tables and plans name full slots, which are granted by whole pages as in any pool. A page has a place on the
device while a row that runs needs it, and otherwise as long as nobody else does; then its bytes lie on the host. So
more requests are under way than the device has room for, and none computes again what it has computed.

bring   the pages of the rows of the next forward have places: those used longest ago leave, saved if their bytes on the
        host are old; what was away comes back; both are copies on a side stream, for which the forward waits
free    pages of the last holder have neither place nor bytes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvcanary import PoolView
from kvcanary.faults import seam
from kvcanary.invariants import check_device_pages, check_device_room, check_resident
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.host_rows import HostRows, slots_of
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.pools.slot_map import SlotMap

if TYPE_CHECKING:
    from kvcanary import CanaryManager
    from kvcanary.transfers import PageSnapshot
    from spec_engine.step.streams import Event, Streams

GROUP = "device"
STREAM = "split pool"


class SplitRow(NamedTuple):
    """One request whose forward is next: its pages in row order; it writes at ``first_new`` and behind."""

    request_id: str
    pages: Sequence[int]
    first_new: int


class SplitPool(PageAllocator):
    """The allocator of the full pages, and where on the device they lie: use it in the place of the full pool's.

    slot_map: ``[full slots] int64`` on the pool's device: the device slot of a full slot, 0 where it has none
    num_swapped_in, num_swapped_out: pages that were copied, so far
    """

    window: int | None = None  # everything is seen

    def __init__(
        self, num_pages: int, num_own_pages: int, *, page_size: int, device: torch.device, quarantine: int = 0
    ) -> None:
        super().__init__(num_pages, quarantine)
        self.page_size, self.num_own_pages = page_size, num_own_pages
        self._device_pages = PageAllocator(num_own_pages)  # given again at once: a copy that still reads is waited for
        self._map = SlotMap((num_pages + 1) * page_size, device)
        self.slot_map = self._map.slots
        self._places: OrderedDict[int, int] = OrderedDict()  # full page: its device page, used longest ago first
        self._saved: dict[int, PageSnapshot | None] = {}  # full pages whose bytes on the host are those of now
        self._copy: Event | None = None  # the last one that the host has not waited for
        self._canary: CanaryManager | None = None
        self.num_swapped_in = self.num_swapped_out = 0

    def serve(self, pool: KVPool, streams: Streams, canary: CanaryManager | None) -> None:
        """``pool`` has ``num_own_pages`` pages; host memory for all full ones is taken here."""
        self._host = HostRows(pool, (self.num_pages + 1) * self.page_size)
        self._streams, self._canary = streams, canary

    @property
    def host_bytes(self) -> int:
        """Of host memory."""
        return sum(part.nbytes for part in self._host.parts)

    @property
    def num_on_device(self) -> int:
        """Full pages that have a place."""
        return len(self._places)

    def bring(self, what: str, rows: Iterable[SplitRow]) -> None:
        """Have on the device all that the next forward, ``what``, reads and writes; it waits for what is on its way.

        ResidencyError, with nothing changed, where that is more than the device holds.
        """
        rows = list(rows)
        wanted = dict.fromkeys(page for row in rows for page in row.pages)
        check_device_room(what, len(wanted), self.num_own_pages)
        absent = [page for page in wanted if page not in self._places]
        self._make_room(len(absent), wanted)
        if absent:
            self._place(absent)
        for row in rows:
            check_resident(row.request_id, row.pages, self._places)
            for page in row.pages:
                self._places.move_to_end(page)
            for page in row.pages[row.first_new // self.page_size :]:
                self._saved.pop(page, None)
        if absent:
            self._streams.main.use(what, absent)

    def free(self, pages: Sequence[int]) -> None:
        """As of any pool; full pages of the last holder lie nowhere any more."""
        super().free(pages)
        self._host_waits()
        gone = [page for page in pages if page not in self.references]
        for page in gone:
            self._saved.pop(page, None)
        self._leave([page for page in gone if page in self._places])

    def translate(self, full_slots: Tensor) -> Tensor:
        """Device slots of ``full_slots``, int64 of any shape: 0 where there is none, -1 for -1. May be captured."""
        return self._map.translate(full_slots)

    def view(self, pool: KVPool) -> PoolView:
        """The device's pool as the canary sees it: through the map, which may lead nowhere for what nobody reads."""
        return replace(pool.view(), group=GROUP, slot_map=self.slot_map)

    def check_accounting(self, owned: int, evictable: int = 0, protected: int = 0) -> None:
        """PageLeakError unless both kinds of pages add up, ResidencyError where a page that is free has a place."""
        super().check_accounting(owned, evictable, protected)
        self._device_pages.check_accounting(len(self._places))
        check_device_pages(len(self._places), len(self._saved), len(self.references))

    # helpers

    def _host_waits(self) -> None:
        """Nothing is on its way from or to pages that are given back."""
        if self._copy is not None:
            self._streams.host.wait(self._copy)
            self._copy = None

    def _make_room(self, count: int, wanted: Collection[int]) -> None:
        """Pages that were used longest ago leave until ``count`` places are free, but none that is wanted."""
        lack = count - self._device_pages.num_free
        if lack <= 0:
            return
        leaving = [page for page in self._places if page not in wanted][:lack]
        unsaved = [page for page in leaving if page not in self._saved]
        if unsaved:
            self._save(unsaved)
        self._leave(leaving)

    def _save(self, pages: list[int]) -> None:
        """Their bytes go to the host; whoever is given their places comes behind that."""
        none: list[PageSnapshot | None] = [None] * len(pages)
        snapshots = none if self._canary is None else self._canary.on_swap_out(GROUP, pages)
        own = [self._places[page] for page in pages]
        source, places = slots_of(own, self.page_size), slots_of(pages, self.page_size)
        side = self._streams.behind_main(STREAM)
        operation = lambda: self._host.save(source, places)  # noqa: E731
        self._copy = side.submit("swap out", operation, reads=pages, writes=_names(pages))
        self._streams.main.wait(self._copy)
        self._saved.update(zip(pages, snapshots, strict=True))
        self.num_swapped_out += len(pages)

    def _leave(self, pages: list[int]) -> None:
        """Places are free; the canary looks at their bytes once more."""
        if not pages:
            return
        own = [self._places[page] for page in pages]
        if self._canary is not None:
            self._canary.on_unmap(GROUP, pages, own)
        for page in pages:
            del self._places[page]
        self._map.write(slots_of(pages, self.page_size), 0)
        self._device_pages.free(own)

    def _place(self, pages: list[int]) -> None:
        """Give places; what lies on the host comes back."""
        own = self._device_pages.allocate(len(pages))
        self._places.update(zip(pages, own, strict=True))
        self._map.write(slots_of(pages, self.page_size), slots_of(own, self.page_size))
        if self._canary is not None:
            self._canary.on_map(GROUP, pages, own)
        if back := [page for page in pages if page in self._saved]:
            self._load(back)

    def _load(self, pages: list[int]) -> None:
        is_there = partial(self._is_there, pages)
        copied = seam("split.swap_in_skipped", pages, is_there=is_there)
        own = [self._places[page] for page in copied]
        own = seam("split.swap_in_elsewhere", own, is_there=is_there, num_own_pages=self.num_own_pages)
        places, target = slots_of(copied, self.page_size), slots_of(own, self.page_size)
        side = self._streams.behind_main(STREAM)
        operation = lambda: self._host.load(places, target)  # noqa: E731
        self._copy = side.submit("swap in", operation, reads=_names(pages), writes=pages)
        self._streams.main.wait(self._copy)
        if self._canary is not None:
            self._canary.on_swap_in(GROUP, pages, [self._saved[page] for page in pages])
        self.num_swapped_in += len(pages)

    def _is_there(self, pages: Sequence[int]) -> bool:
        """Whether their places hold what the host has of them, as where equal pages lay, or nobody has been since."""
        own = [self._places[page] for page in pages]
        return self._host.lie_in(slots_of(pages, self.page_size), slots_of(own, self.page_size))


def _names(pages: Sequence[int]) -> list[str]:
    """What the canary calls what lies of these pages on the host."""
    return [f"swapped page {page}" for page in pages]
