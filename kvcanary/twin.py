"""What the host knows of every slot that was written, and the rows that were judged with it.

Judging an entry of a row is a pure function of what was written, of slots and of positions. While a row names the
same slots and nobody writes them again, the verdict stands; so a step judges only what is new, from plain integers,
and compares the records of the rest with what the canary wrote. Where anything is unequal, blame.py judges the row
in full from the records themselves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat

from kvcanary.forward import Forward
from kvcanary.ledger import INCOMPLETE
from kvcanary.sites import pack_site
from kvcanary.state import CanaryState
from kvcanary_kernels.record import MASK_32, MASK_64, mix, mix_host

MANY_ENTRIES = 64  # from here on mixing with torch costs less than one by one


@dataclass(slots=True, eq=False)
class Batch:
    """What one forward wrote, without its tensors.

    positions, tokens: by entry
    links:  by entry, the entry of this batch that it continues; -1 - row where it continues what lies above the row
    above:  by row, the chain value there, or the entry of another batch
    ends:   by row, the number of entries up to its end
    uids:   by request
    mixed:  by entry, its mix, for batches where they were all taken at once
    chains: chain values that were asked for
    """

    positions: list[int]
    tokens: list[int]
    links: list[int]
    above: list[Entry | int]
    ends: list[int]
    uids: list[int]
    width: int
    step: int
    site: int
    tree: bool
    layers: int
    mixed: list[int] | None
    chains: dict[int, int] = field(default_factory=dict)

    def uid(self, entry: int) -> int:
        return self.uids[bisect_right(self.ends, entry) // self.width]

    def site_word(self, entry: int) -> int:
        """Kind and index of the forward; the node of a tree, the branch of a draft row."""
        row = bisect_right(self.ends, entry)
        node = entry - (self.ends[row - 1] if row else 0) if self.tree else row % self.width
        return self.site | (node & 0xFFFF) << 16


Entry = tuple[Batch, int]
#: What lies in a slot: batch and entry, generation of its page when it was written (INCOMPLETE where a layer did not
#: store), and the step in which it was moved here, or None.
Written = tuple[Batch, int, int, int | None]


class Twin:
    """The host's side of all records, by row of the records of all pools."""

    def __init__(self, state: CanaryState, grants: Sequence[int]) -> None:
        """`grants`: the generation of each page, as it is granted now."""
        self.epoch = 0
        self.unsealed: dict[int, None] = {}  # rows whose records are not on the device yet, oldest first
        self._state, self._grants = state, grants
        self._written: dict[int, Written] = {}
        self._judged: set[int] = set()

    def grant(self, slot: int) -> int:
        """Generation that the page of a slot is granted in."""
        return self._grants[slot // self._state.page_size]

    def __getitem__(self, row: int) -> Written:
        return self._written[row]

    def write(self, forward: Forward) -> None:
        """A forward writes its entries, in the order of the plan; refused entries and null slots are nobody's."""
        slots = forward.write_slots
        if not slots:
            return
        batch = self._batch(forward)
        size, grants, base, null_slots = self._state.page_size, self._grants, forward.pool.base, forward.pool.null_slots
        generations: Iterable[int] = [grants[slot // size] for slot in slots]
        if batch.layers != forward.pool.full_layers:
            generations = repeat(INCOMPLETE)
        written = zip(repeat(batch), range(len(slots)), generations, repeat(None))
        rows = [base + slot for slot in slots]
        if min(slots) >= null_slots:
            self._put(rows, written)
        else:
            pairs = [(row, one) for row, one in zip(rows, written, strict=True) if row - base >= null_slots]
            self._put([row for row, _ in pairs], (one for _, one in pairs))

    def move(self, src: Sequence[int], dst: Sequence[int], generations: Sequence[int], step: int) -> None:
        """Every source is read before any destination is written; what was never written leaves nothing behind."""
        moved = [self._written.get(row) for row in src]
        for row, found in zip(dst, moved, strict=True):
            if found is None:
                self._written.pop(row, None)
        kept = [(row, found, generation) for row, found, generation in zip(dst, moved, generations, strict=True) if found]
        self._put(
            [row for row, _, _ in kept],
            (
                (batch, entry, INCOMPLETE if was == INCOMPLETE else generation, step)
                for _, (batch, entry, was, _), generation in kept
            ),
        )

    def forget_verdicts(self) -> None:
        """Pages were freed, or a judged entry was written again: no verdict stands."""
        self.epoch += 1
        self._judged.clear()

    def judge(
        self, start: int, before: int, rows: Sequence[int], grants: Iterable[int], tokens: Iterable[int | None]
    ) -> bool:
        """Whether these entries stand at positions from `start` on, continue `before` and each other, hold these
        tokens (None: not known) and are whole."""
        for position, (row, grant, token) in enumerate(zip(rows, grants, tokens, strict=True), start):
            found = self._written.get(row)
            if found is None:
                return False
            batch, entry, generation, _ = found
            if batch.positions[entry] != position or generation != grant or self._continued(batch, entry) != before:
                return False
            if token is not None and batch.tokens[entry] != token:
                return False
            before = self.chain(batch, entry)
        self._judged.update(rows)
        return True

    def chain_at(self, row: int) -> int:
        """Chain value of what lies in a slot; 0 where nobody has written."""
        found = self._written.get(row)
        return 0 if found is None else self.chain(found[0], found[1])

    def chain(self, batch: Batch, entry: int) -> int:
        """Chain value of an entry; asked for once, and for few entries: those that become final."""
        chain = batch.chains.get(entry)
        if chain is not None:
            return chain
        missing: list[Entry] = []
        place: Entry | int = (batch, entry)
        while not isinstance(place, int) and place[1] not in place[0].chains:
            missing.append(place)
            link = place[0].links[place[1]]
            place = (place[0], link) if link >= 0 else place[0].above[-1 - link]
        chain = place if isinstance(place, int) else place[0].chains[place[1]]
        keys = self._state.keys
        for one, number in reversed(missing):
            own = mix_host(one.tokens[number], one.positions[number], keys) if one.mixed is None else one.mixed[number]
            chain = one.chains[number] = (keys.multiplier * chain + own) & MASK_64
        return chain

    def _continued(self, batch: Batch, entry: int) -> int:
        """Chain value of what an entry continues."""
        link = batch.links[entry]
        if link >= 0:
            return self.chain(batch, link)
        above = batch.above[-1 - link]
        return above if isinstance(above, int) else self.chain(*above)

    def _put(self, rows: Collection[int], written: Iterable[Written]) -> None:
        if not self._judged.isdisjoint(rows):
            self.forget_verdicts()
        self._written.update(zip(rows, written, strict=True))
        self.unsealed.update(dict.fromkeys(rows))

    def _batch(self, forward: Forward) -> Batch:
        tokens, parents, positions = forward.write.tokens, forward.write_parents, forward.write_positions
        mixed = None
        if len(positions) > MANY_ENTRIES and forward.kind != "verify":
            mixed = mix(tokens, forward.write.positions, self._state.keys).tolist()
        links: list[int] = []
        above: list[Entry | int] = []
        for row, (written, tail) in enumerate(zip(forward.written, forward.tails, strict=True)):
            above.append(self._above(forward, row, tail, written))
            first, own = len(links), -1 - row
            if parents is not None:
                links += [own if parent < 0 else parent for parent in parents[first : first + written]]
            elif written:
                links.append(own)
                links += range(first, first + written - 1)
        return Batch(
            positions,
            tokens.tolist(),
            links,
            above,
            list(accumulate(forward.written)),
            [request.uid for request in forward.requests],
            forward.read.rows_per_request,
            forward.step & MASK_32,
            pack_site(forward.kind, forward.index),
            parents is not None,
            forward.stored,
            mixed,
        )

    def _above(self, forward: Forward, row: int, tail: list[int], written: int) -> Entry | int:
        """What the first own entry of a row continues."""
        if len(tail) > written:
            slot = tail[-written - 1]
        elif length := forward.prefix_len(row):
            slot = forward.slot_at(forward.bounds[row] + length - 1)
        else:
            return forward.pool.root
        found = self._written.get(forward.pool.base + slot)
        return 0 if found is None else (found[0], found[1])
