"""What a canary of watched pools has on the device: records and fingerprints of slots, and the truth of rows."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvcanary.adapters.observed.state import Group, Layers
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.pools.views import PoolView
from kvcanary_kernels.record.layout import COLUMNS, make_keys
from kvcanary_kernels.record.rows import WORD_BYTES
from kvcanary_kernels.watch.walk import NOT_FOLLOWED, TAILS, Truth

UPLOADS = 64  # that may be on their way


class Memory:
    """Of one engine's pools on one device; it never grows once they are named."""

    def __init__(self, config: CanaryConfig, num_rows: int, max_rejected: int, device: torch.device | str) -> None:
        """As PagedCanary."""
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.seed = config.drawn_seed()
        self.identity = make_keys(self.seed, 1, 1, self.device)
        self.groups: list[Group] = []
        self.truth = Truth(self.zeros(num_rows, TAILS + max_rejected + 2))
        self.truth.ends.fill_(NOT_FOLLOWED)
        self.ahead = max_rejected - 1  # of what a step may take back, all but one are drafts
        self.total = self.zeros(1)
        self._uploads, self._uploaded = self.pinned(UPLOADS, 8 * num_rows), 0

    def add_group(self, number: int, block_size: int, num_slots: int, window: int = 0, *, null_slots: int) -> Group:
        group = Group(number, block_size, window, null_slots, self.zeros(num_slots, COLUMNS))
        self.groups.append(group)
        return group

    def add_layers(
        self, group: Group, view: PoolView, names: Sequence[str], is_late: bool = False, reads_hidden: bool = False
    ) -> None:
        """names, is_late, reads_hidden: as of `Layers`."""
        rows, num_slots = view.rows, group.records.shape[0]
        if rows.num_slots != num_slots:
            raise AdapterError(f"layers of {view.name} have {rows.num_slots} slots, their group {num_slots}")
        keys = make_keys(self.seed, rows.num_layers, rows.words_per_row, self.device, view.share)
        fingerprints, stamps = self.zeros(2, rows.num_layers, num_slots), self.zeros(num_slots)
        kept = fingerprints, stamps, self.zeros(rows.num_layers)
        group.layers.append(Layers(view, tuple(names), keys, *kept, is_late, reads_hidden))

    @property
    def layers(self) -> list[Layers]:
        return [layers for group in self.groups for layers in group.layers]

    @cached_property
    def entry_bytes(self) -> int:
        return sum(layers.entry_bytes for layers in self.layers)

    @property
    def num_bytes(self) -> int:
        """Device memory that records and fingerprints take."""
        own = [layers.fingerprints.nbytes + layers.stamps.nbytes for layers in self.layers]
        return sum(own) + sum(group.records.nbytes for group in self.groups)

    def live_bytes(self, numbers: Iterable[int]) -> int:
        """Bytes of all entries of these rows."""
        return sum(max(end, 0) for end in self.truth.ends[list(numbers)].tolist()) * self.entry_bytes

    def overwritten(self, group: Group, slots: Tensor) -> None:
        """Slots [n] of a group were stored to, -1: none. What other groups had in the same memory is gone.

        Engines that hand out one pool of blocks to several groups lay their layers over each other.
        """
        for other, gone in self._beneath(group, slots):
            for kept in (other.records, *(layers.stamps for layers in other.layers)):
                kept.index_fill_(0, gone, 0)

    def _beneath(self, group: Group, slots: Tensor) -> Iterator[tuple[Group, Tensor]]:
        """Other groups with their slots that lie in the same bytes."""
        for other, own, their in self._sharing[group.number]:
            first, places = slots.clamp(min=0) // own * their, torch.arange(their, device=self.device)
            yield other, (first[:, None] + places).flatten()

    def bytes_gone(self, group: Group, slots: Tensor) -> None:
        """Slots [n] of a group hold something else than was stored, until somebody stores there again. Records stay:
        they say who was last, or already who is next.
        """
        for own, gone in ((group, slots), *self._beneath(group, slots)):
            for layers in own.layers:
                layers.stamps.index_fill_(0, gone, 0)

    @property
    def is_shared(self) -> bool:
        """Whether groups lie over each other."""
        return any(self._sharing.values())

    def covering(self, block_sizes: Sequence[int]) -> Group | None:
        """A group whose layers lie over those of every other, so that a block's bytes are its bytes of these, whichever
        group has it; None: there is none, or a block of one group lies in several of another.

        block_sizes: by group, slots of a block that is granted
        """
        spans = {_bytes_between_blocks(group, size) for group, size in zip(self.groups, block_sizes, strict=True)}
        every = frozenset[int]().union(*self._starts.values())
        covering = (group for group in self.groups if self._starts[group.number] == every)
        return next(covering, None) if len(spans) == 1 else None

    @cached_property
    def _starts(self) -> dict[int, frozenset[int]]:
        """By number of a group, where its layers begin."""
        return {
            group.number: frozenset(k.data_ptr() for own in group.layers for k in own.view.k) for group in self.groups
        }

    @cached_property
    def _sharing(self) -> dict[int, list[tuple[Group, int, int]]]:
        """By number of a group, others over the same memory, and how many slots of both lie in the same bytes."""
        sharing: dict[int, list[tuple[Group, int, int]]] = {group.number: [] for group in self.groups}
        for group, other in itertools.permutations(self.groups, 2):
            if self._starts[group.number] & self._starts[other.number]:
                slots, others = (len(own.records) for own in (group, other))
                unit = max(group.block_size, other.block_size * slots // others)
                sharing[group.number].append((other, unit, unit * others // slots))
        return sharing

    def forget(self) -> None:
        """The bytes are gone, or nobody answers for them any more."""
        for group in self.groups:
            group.records.zero_()
            for layers in group.layers:
                layers.stamps.zero_()
        self.truth.ends.fill_(NOT_FOLLOWED)

    def upload(self, values: Tensor) -> Tensor:
        """To the device, without a wait; what was given long ago is overwritten.

        values: int64 on the host; TypeError where they are not, which a GPU alone would not give back as they were
        """
        if values.dtype != torch.int64:
            raise TypeError(f"what is uploaded must be of torch.int64, got {values.dtype}: convert it first")
        if self.is_cuda and values.numel() <= self._uploads.shape[1]:
            self._uploaded = (self._uploaded + 1) % UPLOADS
            values = self._uploads[self._uploaded, : values.numel()].view(values.shape).copy_(values)
        elif self.is_cuda:  # a copy from memory that is not pinned waits for what was launched before it
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def pinned(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, pin_memory=self.is_cuda)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


class TokenRing:
    """Tokens that the host has, where the device reads them by itself, until the step that reads them is over."""

    def __init__(self, memory: Memory, size: int) -> None:
        self.tokens = memory.pinned(size)
        self._here, self._next = self.tokens.numpy(), 0
        self._held = deque[tuple[int, int, int]]()  # step, first and end of what it reads

    def put(self, tokens: Sequence[int], step: int, is_over: Callable[[int], bool]) -> int | None:
        """Where these begin, for a step to read; None: there is no room, since steps that are not over read there."""
        while self._held and is_over(self._held[0][0]):
            self._held.popleft()
        first = self._next if self._next + len(tokens) <= len(self._here) else 0
        end = first + len(tokens)
        if end > len(self._here) or any(first < until and since < end for _, since, until in self._held):
            return None
        self._here[first:end] = array("q", tokens)
        self._held.append((step, first, end))
        self._next = end
        return first


def _bytes_between_blocks(group: Group, block_size: int) -> int:
    """From the first part of a block of so many slots to that of the next, in one layer."""
    pages = group.layers[0].rows.parts[0][0]
    return block_size // pages.shape[1] * pages.stride(0) * WORD_BYTES
