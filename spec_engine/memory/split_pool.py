"""Split pool: K and V of every token live in host memory, and those of the hot tokens on the device as well.

A slot id is no address here. Requests, tables and plans name logical slots; every consumer translates them, and reads
only what is resident. A request has so many device pages for its hot tokens, and one more for the nodes of a verify:

bind          tokens that a forward is about to write get device slots
save          their bytes go to the host; only what is saved may leave the device
swap_in       tokens come back, in the place of those that were used longest ago
bind_verify   the nodes of a verify get the extra page; ``settle_verify`` keeps and saves the accepted ones

Copies run on a side stream, behind the forwards; whoever reads what was swapped in waits for the event.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcanary import PoolView
from kvcanary.invariants import check_hot_room, check_hot_slots, check_resident, check_verify_width
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.extend import alloc_extend
from spec_engine.memory.host_rows import HostRows, slots_of
from spec_engine.memory.pool import KVPool
from spec_engine.memory.slot_map import SlotMap
from spec_engine.streams import Event, Streams

GROUP = "hot"
STREAM = "split pool"


@dataclass(eq=False)
class _Row:
    """One request.

    pages:    logical pages in row order
    device:   pages of the device pool: hot ones, then the extra one
    resident: device slot by logical slot, used longest ago first
    free:     hot slots that hold nothing
    saved:    logical slots whose bytes are on the host, or on their way behind everything that reads them there
    bound:    device slot by logical slot of the verify that runs
    """

    device: list[int]
    free: list[int]
    pages: list[int] = field(default_factory=list)
    resident: OrderedDict[int, int] = field(default_factory=OrderedDict)
    saved: set[int] = field(default_factory=set)
    bound: dict[int, int] = field(default_factory=dict)


class SplitPool:
    """``pool`` is the device pool; ``slot_map [logical slots] int64`` says where in it a token lies, 0 for nowhere."""

    def __init__(self, pool: KVPool, num_logical_pages: int, hot_pages: int, streams: Streams) -> None:
        self.page_size, self.hot_pages = pool.page_size, hot_pages
        self._pool, self._streams = pool, streams
        self._logical = PageAllocator(num_logical_pages)
        self._device = PageAllocator(pool.num_slots // pool.page_size - 1)
        num_slots = (num_logical_pages + 1) * pool.page_size
        self._map = SlotMap(num_slots, pool.kv.device)
        self.slot_map = self._map.slots
        self._host = HostRows(pool, num_slots)
        self._rows: dict[str, _Row] = {}

    @property
    def num_free(self) -> int:
        """Logical pages that are free."""
        return self._logical.num_free

    def start(self, request_id: str) -> None:
        """Device pages for a new request; PoolExhaustedError where they are not free."""
        device = self._device.allocate(self.hot_pages + 1)
        self._rows[request_id] = _Row(device, slots_of(device[:-1], self.page_size).tolist())

    def alloc_extend(self, request_id: str, length: int) -> list[int]:
        """Logical pages so that the row holds ``length`` entries: the new ones.

        Pages are counted, not tokens: PoolExhaustedError also where enough slots are free, but in pages of others.
        """
        row = self._rows[request_id]
        new = alloc_extend(self._logical, len(row.pages), length, self.page_size)
        row.pages += new
        return new

    def translate(self, logical_slots: Tensor) -> Tensor:
        """Device slots, int64 of any shape: 0 where a token is not resident, -1 for -1. May be captured."""
        return self._map.translate(logical_slots)

    def use(self, request_id: str, slots: Sequence[int]) -> None:
        """A forward reads or writes these logical slots: ResidencyError where one is not on the device."""
        row = self._rows[request_id]
        check_resident(request_id, slots, row.resident.keys() | row.bound.keys())
        for slot in slots:
            if slot in row.resident:
                row.resident.move_to_end(slot)

    def bind(self, request_id: str, slots: Sequence[int]) -> None:
        """Logical slots that the next forward writes get device slots; saved tokens make room."""
        row = self._rows[request_id]
        self._main_waits()
        self._take_hot(request_id, row, [slot for slot in slots if slot not in row.resident], slots)
        row.saved.difference_update(slots)

    def save(self, request_id: str, slots: Sequence[int]) -> Event:
        """Copy resident tokens to the host, behind the forward that wrote them."""
        row = self._rows[request_id]
        check_resident(request_id, slots, row.resident)
        row.saved.update(slots)
        source, places = _ints(row.resident[slot] for slot in slots), _ints(slots)
        side = self._streams.behind_main(STREAM)
        return side.submit("save", lambda: self._host.save(source, places), reads=self._pages(slots))

    def swap_in(self, request_id: str, slots: Sequence[int]) -> Event | None:
        """Bring saved tokens to the device; the event to wait for, None where all are there already.

        ResidencyError where the host does not have one, or where they do not fit beside what is not saved yet.
        """
        row = self._rows[request_id]
        absent = [slot for slot in slots if slot not in row.resident]
        check_resident(request_id, absent, row.saved)
        self._take_hot(request_id, row, absent, slots)
        self.use(request_id, slots)
        if not absent:
            return None
        places, target = _ints(absent), _ints(row.resident[slot] for slot in absent)
        side = self._streams.behind_main(STREAM)
        return side.submit("swap in", lambda: self._host.load(places, target), writes=self._pages(absent))

    def swap_out(self, request_id: str, slots: Sequence[int]) -> Event | None:
        """These tokens leave the device; what is not saved is saved before. The event of that, None without."""
        row = self._rows[request_id]
        check_resident(request_id, slots, row.resident)
        unsaved = [slot for slot in slots if slot not in row.saved]
        event = self.save(request_id, unsaved) if unsaved else None
        self._drop(row, slots)
        return event

    def bind_verify(self, request_id: str, slots: Sequence[int]) -> None:
        """The logical slots of the N nodes of a verify are those of the extra page, until it is settled."""
        row = self._rows[request_id]
        taken = len(row.bound) + sum(slot in row.resident for slot in slots)
        check_verify_width(request_id, len(slots), taken, self.page_size)
        own = slots_of(row.device[-1:], self.page_size)[: len(slots)]
        row.bound = dict(zip(slots, own.tolist(), strict=True))
        self._map.write(_ints(slots), own)

    def settle_verify(self, request_id: str, accepted: Sequence[int]) -> Event | None:
        """Accepted nodes move to hot slots and are saved; the others lie nowhere any more, the extra page is free.

        accepted: their logical slots, after compaction; the event of the save, None where there is none.
        """
        row = self._rows[request_id]
        check_resident(request_id, accepted, row.bound)
        source = _ints(row.bound[slot] for slot in accepted)
        self.bind(request_id, accepted)
        self._map.write(_ints(row.bound.keys() - accepted), 0)
        row.bound = {}
        if not accepted:
            return None
        target = _ints(row.resident[slot] for slot in accepted)
        self._streams.main.submit("settle", lambda: self._pool.move(source, target), writes=self._pages(accepted))
        return self.save(request_id, accepted)

    def release(self, request_id: str) -> None:
        """The request is over: the host waits for its copies, then all its pages are free."""
        row = self._rows.pop(request_id)
        if (last := self._streams.side(STREAM).last) is not None:
            self._streams.host.wait(last)
        self._map.write(slots_of(row.pages, self.page_size), 0)
        self._logical.free(row.pages)
        self._device.free(row.device)

    def view(self) -> PoolView:
        """The device pool as the canary sees it: through the map."""
        return replace(self._pool.view(), group=GROUP, slot_map=self.slot_map)

    def check_accounting(self) -> None:
        """PageLeakError unless logical and device pages add up; ResidencyError where a hot slot was lost."""
        rows = self._rows.values()
        self._logical.check_accounting(sum(len(row.pages) for row in rows))
        self._device.check_accounting(sum(len(row.device) for row in rows))
        for request_id, row in self._rows.items():
            check_hot_slots(request_id, len(row.free), len(row.resident), self.hot_pages * self.page_size)

    # helpers

    def _take_hot(self, request_id: str, row: _Row, absent: Sequence[int], kept: Sequence[int]) -> None:
        """Hot slots for tokens that have none, in the place of saved ones that are not in ``kept``."""
        lack = len(absent) - len(row.free)
        if lack > 0:
            leaving = row.saved.difference(kept)
            idle = [slot for slot in row.resident if slot in leaving]
            room = len(row.free) + len(idle)
            check_hot_room(request_id, len(absent), room, self.hot_pages * self.page_size)
            self._drop(row, idle[:lack])
        taken = [row.free.pop() for _ in absent]
        row.resident.update(zip(absent, taken, strict=True))
        self._map.write(_ints(absent), _ints(taken))

    def _drop(self, row: _Row, slots: Sequence[int]) -> None:
        row.free += [row.resident.pop(slot) for slot in slots]
        self._map.write(_ints(slots), 0)

    def _main_waits(self) -> None:
        """The forwards write hot slots from which a save may still read."""
        if (last := self._streams.side(STREAM).last) is not None:
            self._streams.main.wait(last)

    def _pages(self, slots: Sequence[int]) -> list[int]:
        """Logical pages of these slots, each once: what the canary's tickets name."""
        return sorted({slot // self.page_size for slot in slots})


def _ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
