"""Content names of one group: what the bytes of an entry, or of a full block, were when somebody wrote the same prefix.

Entries that this worker wrote lie in a table on the device, chain to fingerprint, that never changes an entry; a prefix
whose bytes were once written in two ways has no name there any more. Full blocks are published, too, where a store is
set: another process, or this one after a restart, compares the sum of a block's fingerprints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Group
from kvcanary.names import MOST_WAYS, Named, Published
from kvcanary.names.sums import weights_of
from kvcanary_kernels.record.layout import seed_id

NAMES = 1 << 20
HOST_BUFFERS = 8  # steps whose blocks are on their way to the host


class Names:
    """Of one group; `connector`: what its engine calls that which loads."""

    def __init__(
        self, canary: PagedCanary, group: Group, connector: str, published: Published | None = None, model: str = ""
    ) -> None:
        """As `Loads`."""
        self.connector, device = connector, canary.memory.device
        #: Chain and fingerprint; the last is nobody's.
        self._known = torch.zeros(2, NAMES + 1, dtype=torch.int64, device=device)
        self._several = torch.zeros(NAMES + 1, dtype=torch.bool, device=device)
        self._published = published
        if published is not None:
            self._space = space_of(canary, group, model)
            self._blocks = FullBlocks(canary, group)
            published.expect_space(self._space)

    @property
    def store(self) -> str | None:
        """Where names of blocks are kept."""
        return None if self._published is None else self._published.label

    def launch(self, group: Group, slots: Tensor, chains: Tensor) -> None:
        """Slots [n], -1 where nothing was stored, and their chains. It may be captured."""
        fingerprints = group.layers[0].fingerprints[0].index_select(1, slots.clamp(min=0)).sum(0)
        self.give(fingerprints, chains, slots >= 0)
        if self._published is not None:
            self._blocks.launch(group, slots, chains)

    def publish(self) -> None:
        """Send the names of blocks that the last forward filled to the store."""
        if self._published is not None:
            self._blocks.publish(self._published, self._space)

    def give(self, fingerprints: Tensor, chains: Tensor, is_stored: Tensor) -> None:
        """Entries [n] were stored under these chains, but for those where `is_stored` [n] bool says no."""
        places = torch.where(is_stored, chains & (NAMES - 1), NAMES)
        is_free = self._known[0, places] == 0
        self._known[0, torch.where(is_free, places, NAMES)] = chains
        is_own = self._known[0, places] == chains
        first = torch.where(is_own & is_free, places, NAMES)
        self._known[1, first] = fingerprints
        differs = is_own & (self._known[1, places] != fingerprints)
        self._several.index_fill_(0, torch.where(differs, places, NAMES), True)

    def fingerprint_of(self, chains: Tensor) -> tuple[Tensor, Tensor]:
        """([n] int64 fingerprints, [n] bool where they are known)."""
        places = chains & (NAMES - 1)
        known = (self._known[0, places] == chains) & ~self._several[places]
        return self._known[1, places], known

    def chain_of(self, fingerprint: int) -> int | None:
        """The chain under which bytes of such a sum were written; None where that is not known."""
        known = ((self._known[1] == fingerprint) & (self._known[0] != 0))[:-1].nonzero()
        return int(self._known[0, known[0, 0]]) if len(known) else None

    def of_blocks(self, chains: Sequence[int]) -> dict[int, Named]:
        """By the chain of its last token, what a block may be; a chain that was written in more ways is left out."""
        if self._published is None:
            return {}
        told = self._published.get(self._space, chains)
        return {chain: ways for chain, ways in told.items() if len(ways) <= MOST_WAYS}

    def block_chain_of(self, fingerprint: int) -> int | None:
        """The chain under which a block of such a sum was published."""
        return None if self._published is None else self._published.chain_of(self._space, fingerprint)


class FullBlocks:
    """Chain and sum of fingerprints of the blocks that a forward fills, found on the device, read by a thread."""

    def __init__(self, canary: PagedCanary, group: Group) -> None:
        self._rows, size = canary.num_rows, group.block_size
        most = _most_full(canary.max_tokens, self._rows, size)
        self._offsets = torch.arange(size, device=canary.memory.device)
        self._weights = weights_of(size, canary.memory.device)
        self._full = canary.memory.zeros(2, most + 1)  # the last is nobody's
        self._here = [canary.memory.pinned(2, most + 1) for _ in range(HOST_BUFFERS)]
        self._is_free = [True] * HOST_BUFFERS

    def launch(self, group: Group, slots: Tensor, chains: Tensor) -> None:
        """As `Names.launch`. What a step does not fill is chain 0."""
        size, none = group.block_size, self._full.shape[1] - 1
        is_end = (slots >= group.null_slots) & (slots % size == size - 1)
        count = min(_most_full(len(slots), self._rows, size), none)
        places = torch.where(is_end, is_end.cumsum(0) - 1, count)
        ends, own = torch.zeros(2, count + 1, dtype=torch.int64, device=slots.device)
        ends.index_copy_(0, places, slots.clamp(min=0))
        own.index_copy_(0, places, chains)
        entries = (ends[:count, None] // size * size + self._offsets).flatten()
        self._full.zero_()
        self._full[0, :count] = torch.where(torch.arange(count, device=slots.device) < is_end.sum(), own[:count], 0)
        sums = group.layers[0].fingerprints[0].index_select(1, entries).sum(0).view(-1, size)
        self._full[1, :count] = (sums * self._weights).sum(1)

    def publish(self, published: Published, space: str) -> None:
        """Send what is there on its way; nothing waits for it."""
        number = next((n for n, is_free in enumerate(self._is_free) if is_free), None)
        if number is None:
            published.lose()
            return
        here, arrived = self._here[number], None
        here.copy_(self._full, non_blocking=True)
        if self._full.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._is_free[number] = False

        def take() -> list[tuple[int, int]]:
            if arrived is not None:
                arrived.synchronize()
            chains, sums = here[:, here[0] != 0].tolist()
            self._is_free[number] = True
            return list(zip(chains, sums, strict=True))

        if not published.give(space, take):
            self._is_free[number] = True


def space_of(canary: PagedCanary, group: Group, model: str) -> str:
    """What two names must have in common to be compared."""
    layers = group.layers[0]
    parts = ", ".join(f"{name} {what}" for name, what in layers.described["parts"].items())
    seed = f"seed {seed_id(canary.memory.seed)}"
    return f"{model}, {seed}, group {group.number}, blocks of {group.block_size}, {len(layers.names)} layers of {parts}"


def _most_full(num_tokens: int, num_rows: int, size: int) -> int:
    """Blocks that so many tokens of so many rows can fill."""
    return num_tokens // size + min(num_tokens, num_rows)
