"""Owners of blocks in a vLLM worker: what the scheduler tells of its pool, or else the worker's own ledger.

A worker knows of each request the blocks that it was given, and when it ends or is preempted. By that alone a block is
somebody's from its grant on, and free when nobody who was given it runs: R7, R8 and W2. Where the scheduler tells what
its `BlockPool` does (`block_pool`), frees are known as they happen, and so is which blocks are full and may only be
read from the next step on: W3 too.

In no case is a table of the worker believed. A window frees blocks that its row still names: nobody reads these, and
whoever is given one has it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.owners import FREE, SHARED, SHARED_WRITER, UNJUDGED, place_of
from kvcanary.adapters.vllm.block_pool import ATTRIBUTE, FREED, GRANTED, HASHED, TOUCHED, read
from kvcanary.scrub.free_slots import FreeSlots

BY_WORKER, BY_SCHEDULER = "the worker's own ledger", "the scheduler's block pool"
FED_BY = {BY_WORKER: frozenset({"R7", "R8", "W2"}), BY_SCHEDULER: frozenset({"R7", "R8", "W2", "W3"})}
UNHEARD = "steps before which the scheduler's block pool was not heard"
NULL_BLOCK = 0
#: What happened to blocks, and to whom.
GRANTED_TO, SHARED_WITH, FULL, GIVEN_BACK, TAKEN_BACK = (
    "granted to {}", "shared with {}", "full and in the prefix cache", "given back", "to be computed again for {}",
)  # fmt: skip
MOST_EVENTS, MOST_TOLD = 1 << 12, 3  # that are kept, and told of one block
#: A request, by group blocks that it was given, and how many entries it had; None: they follow what it had before.
Given = tuple[str, Sequence[Sequence[int]], int | None]
#: What happened (with a place for a request's name), the step, and to which blocks, each with that name. All that a
#: step gives is one of these: an object a block is as much more for the garbage collector, and for cold caches.
Happened = tuple[str, int, dict[int, str]]


class BlockLedger:
    """Who was given which block, and in which step.

    fed_by: what all of it is known from; None until the first blocks are given
    """

    def __init__(self, canary: PagedCanary, block_sizes: Sequence[int], are_shared: bool = False) -> None:
        """block_sizes: by group, slots of the manager's blocks;  are_shared: some of their blocks are states"""
        self.canary, self._fed = canary, canary.fed
        self.fed_by: str | None = None
        self.owners = canary.follow_blocks(block_sizes, are_shared)
        for group, own in enumerate(self.owners.of):
            own.told_of = functools.partial(self._told_of, group)
        self.freed: Callable[[Sequence[int]], None] | None = None  # is told of blocks that the pool takes back
        self._uids: dict[str, int] = {}
        self._serial: int | None = None
        self._is_told = False  # by the scheduler, of the step that is next
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing is known of any block."""
        self.owners.forget()
        self._fresh: dict[int, bool] = {}  # granted by the pool and no row's yet; whether others may read it
        self._private = set[int]()  # granted by the pool and not hashed since: nobody will find them in a prefix cache
        self._full = set[int]()  # hashed, once the step has run in which they become full
        self._holders: dict[int, str | set[str]] = {}  # the request that runs and was given a block, or several
        self._given: dict[str, list[int]] = {}  # by request that runs, the blocks that it was given
        self._events: deque[Happened] = deque(maxlen=MOST_EVENTS)
        if self.canary.poison is not None:
            self.canary.poison.forget()

    # a step

    def begin(self, output: Any) -> None:
        """What vLLM's scheduler says of the step that is next, but for the blocks that rows are given in it."""
        told = getattr(output, ATTRIBUTE, None)
        self._is_told = told is not None
        if told is not None:
            self._replay(told)
        if output.finished_req_ids or output.preempted_req_ids:
            for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
                self._uids.pop(name, None)
                self._left(name)

    def came(self, uids: Mapping[str, int]) -> None:
        """Requests have rows now, with these uids."""
        self._uids |= uids

    def given(self, given: Sequence[Given]) -> None:
        """Blocks that rows are given in this step."""
        if self._is_told:
            self._take_fresh(given)
        else:
            self._take_own(given)

    def taken_back(self, name: str, lines: Sequence[Sequence[int]]) -> None:
        """The scheduler has a row computed again: it writes these blocks once more, by group, which others may read."""
        uid = self._uids.get(name)
        if uid is not None and self.fed_by == BY_SCHEDULER:
            places = [place_of(group, block) for group, own in enumerate(lines) for block in own if block != NULL_BLOCK]
            self._put(dict.fromkeys(places, SHARED_WRITER - uid), TAKEN_BACK, dict.fromkeys(places, name))

    def _follow(self, feed: str) -> None:
        if feed == self.fed_by:
            return
        self._begin_anew()
        self.fed_by, self.canary.fed = feed, self._fed | FED_BY[feed]
        if self.canary.poison is not None and feed == BY_SCHEDULER:
            self.canary.fed |= {"P1"}

    # by what workers are told anyway

    def _take_own(self, given: Sequence[Given]) -> None:
        """Blocks that nobody has filled are one request's alone; the others are a prefix cache's, or were loaded.

        Those that they will write come first, for others may read them too.
        """
        self._follow(BY_WORKER)
        anew = [one for one in given if one[2] is not None]  # all its blocks, once more
        for name, _, _ in anew:
            self._left(name)
        fresh = dict(self._claimed(given, is_old=False))
        self._holders.update(fresh)
        self._put({place: self._uids.get(name, UNJUDGED) for place, name in fresh.items()}, GRANTED_TO, fresh)
        old = self._claimed(anew, is_old=True)  # of which several may have one
        for place, name in old:
            self._hold(place, name)
        self._put({place: UNJUDGED for place, _ in old}, SHARED_WITH, dict(old))

    def _claimed(self, given: Sequence[Given], is_old: bool) -> list[tuple[int, str]]:
        """Blocks whose entries their request has already (is_old), or has not all of them; each with its name."""
        claimed: list[tuple[int, str]] = []
        for name, blocks, length in given:
            for group, own in enumerate(blocks):
                if length is not None:
                    old = length // self.owners.block_sizes[group]
                    own = own[:old] if is_old else own[old:]
                places = [place_of(group, block) for block in own if block != NULL_BLOCK]
                claimed += [(place, name) for place in places]
                self._given.setdefault(name, []).extend(places)
        return claimed

    def _hold(self, place: int, name: str) -> None:
        """One more request has this block."""
        held = self._holders.setdefault(place, name)
        if isinstance(held, set):
            held.add(name)
        elif held != name:
            self._holders[place] = {held, name}

    def _left(self, name: str) -> None:
        """A request has ended: what nobody else was given is free."""
        free = []
        for place in self._given.pop(name, ()):
            held = self._holders.get(place)  # another, where it was given away meanwhile, as windows let blocks go
            if isinstance(held, set):
                held.discard(name)
            if held == name or held == set():
                del self._holders[place]
                free.append(place)
        self._give(free, FREE, GIVEN_BACK)

    # by what the scheduler's pool did

    def _replay(self, told: bytes) -> None:
        serial, events = read(told)
        if self._serial is not None and serial != self._serial + 1:
            self._begin_anew()
            self.canary.coverage.skip(UNHEARD, 1)
        self._serial = serial
        self._follow(BY_SCHEDULER)
        if self._full:
            full, self._full = self._known(self._full), set()
            self._give([place for place in full if self.owners.owner(place) != FREE], SHARED, FULL)
        for kind, blocks in events:
            self._happened(kind, blocks)

    def _happened(self, kind: int, blocks: Sequence[int]) -> None:
        if self.canary.poison is not None:
            self._poison(self.canary.poison, kind, blocks)
        if kind == GRANTED:
            self._fresh.update(dict.fromkeys(blocks, False))
        elif kind == HASHED:
            self._full.update(blocks)
        elif kind == TOUCHED:
            self._fresh.update({block: True for block in blocks if block in self._fresh})
            self._share(self._known(blocks))
        else:
            self._full.difference_update(blocks)
            if kind == FREED and self.freed is not None:
                self.freed(blocks)
            for block in blocks if kind == FREED else ():
                self._fresh.pop(block, None)
            self._give(self._known(blocks), *((FREE, GIVEN_BACK) if kind == FREED else (UNJUDGED, "not loaded")))

    def _poison(self, poison: FreeSlots, kind: int, blocks: Sequence[int]) -> None:
        """What is free and will be granted before it is read again is filled, and looked at when it is granted."""
        if kind == GRANTED:
            slots = self._slots_of(poison.group, blocks)
            poison.granted(slots, torch.zeros_like(slots))
            self._private.update(blocks)
        elif kind == FREED and (free := [block for block in blocks if block in self._private]):
            poison.freed(self._slots_of(poison.group, free))
        if kind in (FREED, HASHED):
            self._private.difference_update(blocks)

    def _slots_of(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        """Of the manager's blocks, in this group; no wait."""
        size, memory = self.owners.block_sizes[group], self.canary.memory
        slots = (torch.tensor(blocks)[:, None] * size + torch.arange(size)).flatten()
        return (slots.pin_memory() if memory.is_cuda else slots).to(memory.device, non_blocking=True)

    def _share(self, places: Sequence[int]) -> None:
        """Others may read these; who was granted one goes on writing until it is full."""
        owners = {place: self.owners.owner(place) for place in places}
        shared = {place: SHARED_WRITER - own if own else SHARED for place, own in owners.items() if own >= FREE}
        self._put(shared, "shared", dict.fromkeys(shared, ""))

    def _take_fresh(self, given: Sequence[Given]) -> None:
        """Blocks that the pool has granted are whose they are given to; what it has not granted stays whose it is."""
        owners: dict[int, int] = {}
        names: dict[int, str] = {}
        fresh = self._fresh
        for name, blocks, _ in given:
            uid = self._uids.get(name)
            for group, own in enumerate(blocks):
                first = place_of(group, 0)
                for block in own:
                    is_shared = fresh.pop(block, None)
                    if is_shared is not None:
                        owners[first | block] = UNJUDGED if uid is None else SHARED_WRITER - uid if is_shared else uid
                        names[first | block] = name
        self._put(owners, GRANTED_TO, names)

    # helpers

    def _known(self, blocks: Iterable[int]) -> list[int]:
        """Of which something is known, in every group; the pool does not say for which it granted a block."""
        firsts = [place_of(group, 0) for group in range(len(self.owners.of))]
        return self.owners.known([first | block for block in blocks for first in firsts])

    def _give(self, places: Sequence[int], owner: int, what: str) -> None:
        self._put(dict.fromkeys(places, owner), what, dict.fromkeys(places, ""))

    def _put(self, owners: dict[int, int], what: str, names: dict[int, str]) -> None:
        if owners:
            self.owners.give(owners)
            self._events.append((what, self.canary.step + 1, names))

    def _told_of(self, group: int, slot: int) -> tuple[str, ...]:
        """For a finding: the last that happened to the block of a slot."""
        block = slot // self.owners.block_sizes[group]
        place = place_of(group, block)
        told = [(what, names[place], step) for what, step, names in self._events if place in names]
        return tuple(
            f"block {block} was {what.format(repr(name))} in step {step}" for what, name, step in told[-MOST_TOLD:]
        )
