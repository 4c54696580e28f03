"""Owners of slots, on the device: what an engine tells of grants, shared prefixes and frees, where it tells of them.

What is told waits for the next forward and is done on its stream, in the order in which it was told: a forward on its
way still reads what the engine has given to others meanwhile. Engines that tell of slots use `Owners`, those that tell
of blocks `BlockOwners`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvcanary.records.dispatch import watch_ops_for
from kvcanary.records.graph_cache import Replays
from kvcanary_kernels.record.layout import STEP_SITE
from kvcanary_kernels.watch import walk
from kvcanary_kernels.watch.grant import GROUP_SHIFT, words_of
from kvcanary_kernels.watch.walk import EVERYBODYS, GIVEN_BACK, NOBODYS

SHARED, FREE, RETURNED = EVERYBODYS.value, NOBODYS.value, GIVEN_BACK.value
SHARED_WRITER, UNJUDGED = walk.SHARED_WRITER.value, walk.UNJUDGED.value
#: Changes that a forward takes along in its own line; where there are more, all have launches of their own.
FEW_CHANGES = 128
FEW_WORDS = words_of(FEW_CHANGES)
LINES, MOST_CHANGES = 64, FEW_CHANGES * 4**2  # lines that are on their way, and changes of one
WIDTH = words_of(MOST_CHANGES)
NO_CHANGES = (0,)


class Owners:
    """By slot, the uid of the row that was granted it, or that everybody may read it, or that it is free.

    slots:    [num_slots] int64, as `Watched.owners`
    records:  [num_slots, 8] int64, of the same slots: what is granted anew was not written since (R12)
    told_of:  what is known of the owner of a slot beside who it is, one sentence each
    on_freed: is given what was freed, [n] int64 slots;  on_granted: the same of grants, with the uids of their rows
    """

    def __init__(self, num_slots: int, device: torch.device, records: Tensor | None = None) -> None:
        self.slots = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.records = records
        self.told_of: Callable[[int], tuple[str, ...]] = lambda slot: ()
        self._told: list[Callable[[], object]] = []
        self.on_freed: Callable[[Tensor], object] | None = None
        self.on_granted: Callable[[Tensor, Tensor], object] | None = None

    def granted(self, slots: Tensor, uids: Tensor) -> None:
        """Slots [n] int64 are these rows' [n]; what lies there is nobody's until they store."""
        self._told.append(functools.partial(self._granted, slots, uids))

    def shared(self, slots: Tensor) -> None:
        """A prefix cache holds these slots [n], but for those that were given back and not granted since."""
        self._told.append(functools.partial(self._shared, slots))

    def loaded(self, slots: Tensor) -> None:
        """A prefix cache has taken these slots [n] for what a load brings: everybody's, also those given back."""
        self._told.append(functools.partial(self.slots.index_fill_, 0, slots, SHARED))

    def freed(self, slots: Tensor) -> None:
        """Slots [n] were given back."""
        self._told.append(functools.partial(self._freed, slots))

    def left(self, uid: int) -> None:
        """A row is gone: what it had and nobody has freed is a prefix cache's."""
        self._told.append(lambda: self.slots.masked_fill_(self.slots == uid, SHARED))

    @property
    def is_told(self) -> bool:
        """Whether something waits for the next forward."""
        return bool(self._told)

    def forget(self) -> None:
        """All slots are free, whatever was told."""
        self._told = []
        self.slots.zero_()

    def apply(self) -> None:
        """Do what was told; on the stream of the forward that is next."""
        told, self._told = self._told, []
        for do in told:
            do()

    def _granted(self, slots: Tensor, uids: Tensor) -> None:
        self.slots.index_copy_(0, slots, uids)
        if self.records is not None:
            self.records[:, STEP_SITE].index_fill_(0, slots, 0)
        if self.on_granted is not None:
            self.on_granted(slots, uids)

    def _shared(self, slots: Tensor) -> None:
        held = self.slots[slots]
        self.slots.index_copy_(0, slots, held.masked_fill_(held != RETURNED, SHARED))

    def _freed(self, slots: Tensor) -> None:
        self.slots.index_fill_(0, slots, RETURNED)
        if self.on_freed is not None:
            self.on_freed(slots)

    def prepare(self) -> None:
        """Nothing of this is captured."""


def place_of(group: int, block: int) -> int:
    """One number for a block of a group."""
    return group << GROUP_SHIFT | block


class BlockOwners:
    """Owners of the blocks of all groups: known on the host, and put into the slots of what changed.

    of: by group, its slots; all are UNJUDGED until something is told of them
    """

    def __init__(self, num_slots: Sequence[int], block_sizes: Sequence[int], device: torch.device) -> None:
        """By group, its slots, and those of a block as the engine counts blocks."""
        self.block_sizes, self._device = list(block_sizes), device
        self.of = [Owners(count, device) for count in num_slots]
        self._now: dict[int, int] = {}  # owners by place, where they are known
        self._changed: dict[int, int] = {}
        self._ops, self._replays = watch_ops_for(device), Replays(device)
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._lines, self._ticks = torch.zeros(LINES, WIDTH, dtype=torch.int64, pin_memory=is_cuda), zeros(2)
        self._line_bytes, self._next = self._lines.numpy().data.cast("B"), 0
        self._again: dict[int, Callable[[], Any]] = {}
        self._words, self._cells = zeros(WIDTH), zeros(LINES, 1)
        self.forget()

    def owner(self, place: int) -> int:
        """Who has a block: a uid, FREE, SHARED, SHARED_WRITER - uid where that row alone may write, or UNJUDGED."""
        return self._now.get(place, UNJUDGED)

    def known(self, places: Sequence[int]) -> list[int]:
        """Those of whose owners something is known."""
        now = self._now
        return [place for place in places if now.get(place, UNJUDGED) != UNJUDGED]

    def give(self, owners: Mapping[int, int]) -> None:
        """Blocks are somebody's from the next forward on; owners by place, as `place_of` says."""
        self._now.update(owners)
        self._changed.update(owners)

    @property
    def is_told(self) -> bool:
        """Whether something waits for the next forward."""
        return bool(self._changed)

    def forget(self) -> None:
        """Nothing is known any more."""
        self._now, self._changed = {}, {}
        for own in self.of:
            own.slots.fill_(UNJUDGED)

    def apply(self) -> None:
        """Do what was told, where `few` cannot; on the stream of the forward that is next."""
        if len(self._changed) <= FEW_CHANGES:
            return
        changed, self._changed = list(self._changed.items()), {}
        for first in range(0, len(changed), MOST_CHANGES):
            if first and first % (LINES // 2 * MOST_CHANGES) == 0 and self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # lines are about to be used again
            self._launch(changed[first : first + MOST_CHANGES])

    def few(self) -> tuple[int, ...]:
        """As `grant` takes them, changes that were told and `apply` has left: the next forward takes them along."""
        changed = self._changed
        if not changed:
            return NO_CHANGES
        self._changed = {}
        return len(changed), *chain.from_iterable(changed.items())

    def prepare(self) -> None:
        """Compile and capture what changes of every number launch."""
        for _ in range(2):
            size = FEW_CHANGES
            while size <= MOST_CHANGES:
                self._launch((), size)
                size *= 4
        self._ticks.zero_()
        self._next = 0

    def _launch(self, changed: Sequence[tuple[int, int]], most: int = FEW_CHANGES) -> None:
        """most: at least so many are launched for"""
        while most < len(changed):
            most *= 4
        self._next = (self._next + 1) % LINES
        words = len(changed), *chain.from_iterable(changed)
        struct.pack_into(f"={len(words)}q", self._line_bytes, self._next * WIDTH * 8, *words)
        again = self._again.get(most) or functools.partial(
            self._replays.run, most, functools.partial(self._grant, most)
        )
        self._again[most] = again() or again

    def _grant(self, most: int) -> None:
        width = words_of(most)
        self._ops.fetch(self._lines, self._ticks, self._words, width=width, cells=self._cells)
        self.grant(self._words[:width])

    def grant(self, words: Tensor) -> None:
        """Put changes into slots. words: on the device, as of the kernel's `changes`"""
        for number, (own, size) in enumerate(zip(self.of, self.block_sizes, strict=True)):
            self._ops.grant(words, own.slots, group=number, block_size=size)
