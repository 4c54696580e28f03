"""Load arrival: what a connector did to entries that it loaded wrongly, in the words that told pools have for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from kvcanary.adapters.observed.state import Group, Layers, Load, LoadedBlock
from kvcanary.names.sums import undone, weights_of
from kvcanary.pools.slot_maps import Ints
from kvcanary.provenance.arrival import (
    KINDS,
    MISROUTED,
    ONE_WORD,
    OTHER_LAYOUT,
    SHORT,
    STALE,
    UNKNOWN,
    Arrival,
    Origin,
    PoolArrival,
    Sent,
    Trip,
)
from kvcanary.provenance.changed_word import ChangedWord, WordChange, describe_change, part_of_word
from kvcanary.provenance.summed_layouts import exchanged_axes, layout_of_sums, word_of_sums
from kvcanary.records.state import PoolState
from kvcanary.transfers.arrivals import BEFORE, ZERO
from kvcanary_kernels.record.layout import CHAIN, MASK_64, read_record, signed

SAMPLE = 8  # wrong entries at which a layout must hold
EXCHANGED_AXES = "heads and slots of a block are exchanged: HND was read as NHD, or NHD as HND"
MOST_BLOCKS = 4  # wrong blocks of which words and orders are tried
MOST_LOOKED = 64  # wrong entries whose bytes are looked for one by one


def arrival_of(pool: PoolState, group: Group, layers: Layers, load: Load, writers: Mapping[int, str]) -> Arrival:
    """What is known of a load that went wrong; every step answers for entries that those before it could not."""
    judged = _Judged(pool, group, layers, load, writers)
    judged.nothing_arrived()
    judged.by_name()
    judged.one_word()
    judged.layout()
    judged.blocks()
    return judged.arrival()


def first_wrong(own: PoolArrival, load: Load, group: Group) -> tuple[int, int]:
    """Of the first wrong entry, its number among the slots of the trip, and among the entries of the load."""
    place = min(own.origins)
    return place, int((load.positions == place + _first(load, group)).nonzero()[0, 0])


def _first(load: Load, group: Group) -> int:
    """The position with which the first block of a load begins."""
    return int(load.positions[0]) // group.block_size * group.block_size


class _Judged:
    def __init__(self, pool: PoolState, group: Group, layers: Layers, load: Load, writers: Mapping[int, str]) -> None:
        self._pool, self._group, self._layers, self._load, self._writers = pool, group, layers, load, writers
        self._wrong: list[int] = load.wrong.nonzero()[:, 0].tolist()
        self._before, self._found = load.before.cpu(), load.found.cpu()
        self._starts = layers.keys.start_a.cpu()
        self._origins: dict[int, Origin] = {}
        self._words: dict[tuple[int, int], ChangedWord] = {}
        self._wrong_layers: set[int] = set()
        self._in_blocks = {entry for block in load.blocks for entry in block.entries}

    def _left(self) -> list[int]:
        """Entries with a name of their own that nothing explains yet."""
        return [entry for entry in self._wrong if entry not in self._origins and entry not in self._in_blocks]

    def _blocks_left(self) -> list[LoadedBlock]:
        """Blocks of whose entries nothing explains any."""
        return [block for block in self._load.blocks if not any(entry in self._origins for entry in block.entries)]

    def nothing_arrived(self) -> None:
        """Zeros, or what was recorded there before: short where the load ends with them, else stale."""
        zero = self._found == self._starts[:, None]
        old = (self._found == self._before) & (self._before != 0) & ~zero
        held = {entry for entry in self._wrong if bool((zero | old)[:, entry].any())}
        compared = self._load.is_known.nonzero()[:, 0].tolist()
        tail = set(compared[compared.index(min(held)) :]) if held else set()
        for entry in held:
            is_zero = bool(zero[:, entry].any())
            kind = SHORT if is_zero or tail == held else STALE
            self._origins[entry] = Origin(kind, detail=ZERO if is_zero else BEFORE)
            self._wrong_layers.update((zero if is_zero else old)[:, entry].nonzero()[:, 0].tolist())

    def by_name(self) -> None:
        """Bytes that were written here under another prefix."""
        sums = self._found.sum(0)
        for entry in self._left()[:MOST_LOOKED]:
            chain = self._load.names.chain_of(int(sums[entry]))
            if chain is not None:
                here = f"position {int(self._load.positions[entry])}"
                self._origins[entry] = Origin(
                    MISROUTED, detail=f"{here} was loaded with the bytes of {self._whose(chain)}"
                )

    def _whose(self, chain: int) -> str:
        own = (self._load.chains == chain).nonzero()
        if len(own):
            return f"position {int(self._load.positions[own[0, 0]])} of the same prefix"
        held = (self._group.records[:, CHAIN] == chain).nonzero()
        if not len(held):
            return "another prefix, which no row has any more"
        slot = int(held[0, 0])
        record = read_record(self._group.records, slot)
        writer = self._writers.get(record.request)
        who = "a request that ended long ago" if writer is None else repr(writer)
        return f"position {record.position} of {who}, which lie in slot {slot}"

    def one_word(self) -> None:
        for entry in self._left()[:SAMPLE]:
            change = word_of_sums(self._pool, int(self._load.slots[entry]), int(self._load.wanted[entry]))
            if change is not None:
                self._tell_word(entry, change)

    def layout(self) -> None:
        """One answer for all that are left, tried at the first of them."""
        left = self._left()
        if not left:
            return
        sample = left[:SAMPLE]
        text = layout_of_sums(self._pool, self._load.slots[sample], self._wanted(sample))
        if text is None:
            block = int(self._load.positions[left[0]]) // self._group.block_size
            own = (self._load.positions // self._group.block_size == block).nonzero()[:, 0].tolist()
            whole = len(own) == self._group.block_size and len(own) > 1
            if whole and exchanged_axes(self._pool, self._load.slots[own], self._wanted(own)):
                text = EXCHANGED_AXES
        if text is not None:
            self._origins |= dict.fromkeys(left, Origin(OTHER_LAYOUT, detail=text))

    def blocks(self) -> None:
        """The same questions of blocks, of which only the sum of all their entries is known."""
        for block in self._blocks_left()[:MOST_LOOKED]:
            chain = self._load.names.block_chain_of(block.found)
            if chain is not None:
                here = f"position {int(self._load.positions[block.entries[0]])}"
                whose = f"the block at {here} was loaded with the bytes of {self._which_block(chain)}"
                self._origins |= dict.fromkeys(block.entries, Origin(MISROUTED, detail=whose))
        for block in self._blocks_left()[:MOST_BLOCKS]:
            self._word_of(block)
        left = self._blocks_left()
        text = next(filter(None, map(self._order_of, left[:MOST_BLOCKS])), None)
        if text is not None:
            entries = [entry for block in left for entry in block.entries]
            self._origins |= dict.fromkeys(entries, Origin(OTHER_LAYOUT, detail=text))

    def _order_of(self, block: LoadedBlock) -> str | None:
        """What order explains a block that was loaded whole."""
        size, slots = self._group.block_size, self._load.slots[block.entries]
        for wanted in block.ways if len(slots) == size else ():
            sums, weights = np.array([wanted], np.int64), weights_of(size).numpy()
            if (text := layout_of_sums(self._pool, slots, sums, weights)) is not None:
                return text
            if size > 1 and exchanged_axes(self._pool, slots, sums, weights):
                return EXCHANGED_AXES
        return None

    def _which_block(self, chain: int) -> str:
        own = (self._load.chains == chain).nonzero()
        if not len(own):
            return "another prefix"
        return f"the block at position {int(self._load.positions[own[0, 0]]) + 1 - self._group.block_size} of its own"

    def _word_of(self, block: LoadedBlock) -> None:
        """The one word of one entry whose change explains the sum of a block."""
        sums, fits = self._found.sum(0), []
        for wanted in block.ways:
            for entry in block.entries:
                place = int(self._load.positions[entry]) % self._group.block_size
                own = signed(int(sums[entry]) + undone(wanted - block.found, place) & MASK_64)
                change = word_of_sums(self._pool, int(self._load.slots[entry]), own)
                fits += [] if change is None else [(entry, change)]
        if len(fits) == 1:
            [(entry, change)] = fits
            self._tell_word(entry, change)

    def _tell_word(self, entry: int, change: WordChange) -> None:
        slot = int(self._load.slots[entry])
        self._origins[entry] = Origin(ONE_WORD, detail=part_of_word(self._pool, change.number)[0].name)
        self._words[self._pool.pool_id, slot] = describe_change(self._pool, slot, change)
        self._wrong_layers.add(change.layer)

    def _wanted(self, entries: list[int]) -> Ints:
        return self._load.wanted[entries].cpu().numpy()

    def arrival(self) -> Arrival:
        for entry in (*self._left(), *(entry for block in self._blocks_left() for entry in block.entries)):
            self._origins[entry] = Origin(UNKNOWN)
        first, size = _first(self._load, self._group), self._group.block_size
        positions = self._load.positions.cpu().numpy()
        origins = {int(positions[entry]) - first: self._origins[entry] for entry in self._origins}
        compared = (positions - first)[self._load.is_known.cpu().numpy()]
        every = tuple(range(self._pool.view.num_layers))
        is_named = all(origin.kind in (SHORT, STALE, ONE_WORD) for origin in origins.values())
        layers = tuple(sorted(self._wrong_layers)) if is_named and self._wrong_layers else every
        kinds = Counter(origin.kind for origin in origins.values())
        kind = max(KINDS, key=lambda kind: (kinds[kind], -KINDS.index(kind)))
        own = PoolArrival(self._pool.name, layers, len(every), np.asarray(compared), origins)
        return Arrival(_trip(self._load, size), kind, kinds, (own,), (), self._words)


def _trip(load: Load, size: int) -> Trip:
    """Its pages are the blocks of the row that were loaded, in order; none of them left as part of a snapshot."""
    places = (load.positions // size).tolist()
    blocks = dict(zip(places, (load.slots // size).tolist(), strict=True))
    sent = Sent(0, load.step, ())
    pages = [(sent, number, blocks.get(number, -1)) for number in range(places[0], places[-1] + 1)]
    return Trip(load.names.connector, load.step, size, pages)
