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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.owners import FREE, SHARED, SHARED_WRITER, UNJUDGED
from kvcanary.adapters.vllm.block_pool import ATTRIBUTE, FREED, GRANTED, HASHED, TOUCHED, read

BY_WORKER, BY_SCHEDULER = "the worker's own ledger", "the scheduler's block pool"
FED_BY = {BY_WORKER: frozenset({"R7", "R8", "W2"}), BY_SCHEDULER: frozenset({"R7", "R8", "W2", "W3"})}
UNHEARD = "steps before which the scheduler's block pool was not heard"
NULL_BLOCK = 0
#: What happened to a block, and to whom.
GRANTED_TO, SHARED_WITH, FULL = "granted to {}", "shared with {}", "full and in the prefix cache"
#: A request, by group blocks that it was given, and how many entries it had; None: they follow what it had before.
Given = tuple[str, Sequence[Sequence[int]], int | None]


class BlockLedger:
    """Who was given which block, and in which step.

    fed_by: what all of it is known from; None until the first blocks are given
    """

    def __init__(self, canary: PagedCanary, block_sizes: Sequence[int]) -> None:
        """block_sizes: by group, slots of the manager's blocks"""
        self.canary, self._fed = canary, canary.fed
        self.fed_by: str | None = None
        self.owners = canary.follow_blocks(block_sizes)
        for group, own in enumerate(self.owners.of):
            own.told_of = functools.partial(self._told_of, group)
        self._uids: dict[str, int] = {}
        self._serial: int | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing is known of any block."""
        self.owners.forget()
        self._fresh: dict[int, bool] = {}  # granted by the pool and no row's yet; whether others may read it
        self._full = set[int]()  # hashed, once the step has run in which they become full
        self._blocks: dict[str, list[tuple[int, int]]] = {}  # by request, groups and blocks that it was given
        self._holders: dict[tuple[int, int], set[str]] = {}  # requests that run and were given a block
        self._history: dict[tuple[int, int], tuple[tuple[str, str, int], ...]] = {}

    # a step

    def begin(self, output: Any) -> None:
        """What vLLM's scheduler says of the step that is next, but for the blocks that rows are given in it."""
        told = getattr(output, ATTRIBUTE, None)
        if told is not None:
            self._replay(told)
        if output.finished_req_ids or output.preempted_req_ids:
            for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
                self._uids.pop(name, None)
                self._left(name)

    def came(self, uids: Mapping[str, int]) -> None:
        """Requests have rows now, with these uids."""
        self._uids |= uids

    def given(self, output: Any, given: Sequence[Given]) -> None:
        """Blocks that rows are given in this step: those that they will write first, for others may read them too."""
        self._follow(BY_WORKER if getattr(output, ATTRIBUTE, None) is None else BY_SCHEDULER)
        take = self._take_own if self.fed_by == BY_WORKER else self._take_fresh
        is_any_new = False
        for name, _, length in given:
            if length is not None:  # all its blocks, once more
                is_any_new = True
                self._left(name)
        for is_old in (False, True) if is_any_new else (False,):
            claimed = [(one[0], place) for one in given for place in self._places(one, is_old)]
            for name, place in claimed:
                take(name, place, is_old)
            for _, (_, block) in claimed:
                self._fresh.pop(block, None)

    def _places(self, given: Given, is_old: bool) -> Iterable[tuple[int, int]]:
        """Groups and blocks whose entries the request has already (is_old), or has not all of them."""
        _, blocks, length = given
        if length is None and len(blocks) == 1:
            return [(0, block) for block in blocks[0] if block != NULL_BLOCK]
        return self._places_of_all(blocks, length or 0, is_old)

    def _places_of_all(self, blocks: Sequence[Sequence[int]], length: int, is_old: bool) -> Iterator[tuple[int, int]]:
        for group, own in enumerate(blocks):
            old = length // self.owners.block_sizes[group]
            for block in own[:old] if is_old else own[old:]:
                if block != NULL_BLOCK:
                    yield group, block

    def _follow(self, feed: str) -> None:
        if feed != self.fed_by:
            self._begin_anew()
            self.fed_by, self.canary.fed = feed, self._fed | FED_BY[feed]

    # by what workers are told anyway

    def _take_own(self, name: str, place: tuple[int, int], is_old: bool) -> None:
        """A block that nobody has filled is this request's alone; the others are a prefix cache's, or were loaded."""
        if is_old:
            self._holders.setdefault(place, set()).add(name)
            self._give(place, UNJUDGED, SHARED_WITH, name)
        else:
            self._holders[place] = {name}
            self._give(place, self._uids.get(name, UNJUDGED), GRANTED_TO, name)
        self._blocks.setdefault(name, []).append(place)

    def _left(self, name: str) -> None:
        """A request has ended: what nobody else was given is free."""
        for place in self._blocks.pop(name, ()):
            holders = self._holders.get(place, set())
            if name in holders:  # else it was given away meanwhile, as windows let blocks go
                holders.remove(name)
                if not holders:
                    self._give(place, FREE, "given back")

    # by what the scheduler's pool did

    def _replay(self, told: bytes) -> None:
        serial, events = read(told)
        if self._serial is not None and serial != self._serial + 1:
            self._begin_anew()
            self.canary.coverage.skip(UNHEARD, 1)
        self._serial = serial
        self._follow(BY_SCHEDULER)
        if self._full:
            full, self._full = self._full, set()
            for place in self._known(full):
                if self.owners.owner(*place) not in (FREE, UNJUDGED):
                    self._give(place, SHARED, FULL)
        for kind, blocks in events:
            self._happened(kind, blocks)

    def _happened(self, kind: int, blocks: Sequence[int]) -> None:
        if kind == GRANTED:
            self._fresh.update(dict.fromkeys(blocks, False))
        elif kind == HASHED:
            self._full.update(blocks)
        elif kind == TOUCHED:
            self._fresh.update({block: True for block in blocks if block in self._fresh})
            for place in self._known(blocks):
                self._share(place)
        else:
            self._full.difference_update(blocks)
            for block in blocks if kind == FREED else ():
                self._fresh.pop(block, None)
            for place in self._known(blocks):
                self._give(place, *((FREE, "given back") if kind == FREED else (UNJUDGED, "not loaded")))

    def _share(self, place: tuple[int, int]) -> None:
        """Others may read a block; who was granted it goes on writing until it is full."""
        owner = self.owners.owner(*place)
        if owner == FREE or owner > 0:
            self._give(place, SHARED_WRITER - owner if owner else SHARED, "shared")

    def _take_fresh(self, name: str, place: tuple[int, int], is_old: bool) -> None:
        """A block that the pool has granted is who writes it first; what it has not granted stays whose it is."""
        is_shared = self._fresh.get(place[1])
        if is_shared is not None:
            uid = self._uids.get(name)
            owner = UNJUDGED if uid is None else SHARED_WRITER - uid if is_shared else uid
            self._give(place, owner, GRANTED_TO, name)

    # helpers

    def _known(self, blocks: Sequence[int] | set[int]) -> Iterator[tuple[int, int]]:
        """Groups and blocks of which something is known; the pool does not say for which group it granted a block."""
        for block in blocks:
            for group in range(len(self.owners.of)):
                if self.owners.owner(group, block) != UNJUDGED:
                    yield group, block

    def _give(self, place: tuple[int, int], owner: int, what: str, name: str = "") -> None:
        self.owners.give(place, owner)
        self._history[place] = (*self._history.get(place, ())[-2:], (what, name, self.canary.step + 1))

    def _told_of(self, group: int, slot: int) -> tuple[str, ...]:
        """For a finding: the last that happened to the block of a slot."""
        block = slot // self.owners.block_sizes[group]
        told = self._history.get((group, block), ())
        return tuple(f"block {block} was {what.format(repr(name))} in step {step}" for what, name, step in told)
