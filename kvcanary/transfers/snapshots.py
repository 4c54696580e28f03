"""PageSnapshots: what the canary knows of bytes that leave the pools for a while, to be compared when they come
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from kvcanary.calls.violation import Violation, speaks_first
from kvcanary.errors import ContradictionError, ForeignSnapshotError, SealError
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary.pools.slot_maps import Ints, slots_in, slots_of_pages, window_start
from kvcanary.provenance.arrival import Arrival, ArrivedSlots, Peer, Sent, Trip
from kvcanary.records.landings import Landings
from kvcanary.records.record_store import RecordStore, two_words
from kvcanary.records.state import CanaryState, PoolState
from kvcanary.transfers.arrivals import judge
from kvcanary.transfers.cards import PoolCard, card_of, read_card
from kvcanary.transfers.contents import Contents, Incoming, joined
from kvcanary.transfers.recent_snapshots import RecentSnapshots, SentSnapshot, SnapshotFingerprints
from kvcanary.transfers.seal import Seal
from kvcanary.transfers.stale_snapshots import LeftRecords, Outdated
from kvcanary.transfers.wire import Reader, Writer
from kvcanary_kernels.record.layout import CONTENT_B, REQUEST_GENERATION


@dataclass(frozen=True, eq=False)
class PageSnapshot(Seal):
    """Identity and fingerprints of whole pages, by pool. They name content, so they hold wherever it comes back.

    Its bytes (`to_bytes`) hold token ids and positions, no K and no V.

    sent: what left together;  first: number of the first of these pages among them
    layouts: by pool its name, and what its rows are
    """

    kind, of = 1, "snapshot"

    num_pages: int
    contents: tuple[Contents, ...]
    seed_id: str
    layouts: tuple[PoolCard, ...]
    sent: Sent
    first: int = 0
    model: str = ""

    def arrived_from(self, peer: Peer) -> PageSnapshot:
        """The same as another engine has sent it: what is found of its bytes names that engine and its pages."""
        return replace(self, sent=replace(self.sent, peer=peer))

    def behind(self, page: int) -> PageSnapshot:
        """The snapshot of all but the first ``page`` pages, which need not come back."""
        return self._part(page, self.num_pages)

    def each(self) -> list[PageSnapshot]:
        """A snapshot for each page, in order."""
        return [self._part(page, page + 1) for page in range(self.num_pages)]

    def _part(self, first: int, end: int) -> PageSnapshot:
        sizes = (len(contents.fingerprint_b) // self.num_pages for contents in self.contents)
        parts = zip(self.contents, sizes, strict=True)
        contents = tuple(one.part(slice(first * size, end * size)) for one, size in parts)
        return PageSnapshot(
            end - first, contents, self.seed_id, self.layouts, self.sent, self.first + first, self.model
        )

    def _write(self, writer: Writer) -> None:
        for number in (self.num_pages, self.first, self.sent.number, self.sent.step, len(self.sent.pages)):
            writer.number("u64", number)
        writer.array(np.array(self.sent.pages, np.int64), "<i8")
        writer.number("u16", len(self.contents))
        for card, contents in zip(self.layouts, self.contents, strict=True):
            card.write(writer)
            contents.write(writer)

    @classmethod
    def _read(cls, reader: Reader) -> Self:
        num_pages, first, number, step, count = (reader.number("u64") for _ in range(5))
        pages = tuple(reader.array("<i8", count).tolist())
        if not 0 <= num_pages <= count - first:
            raise SealError(f"a seal of {count} pages has none from {first} on, {num_pages} of them: nothing was read")
        cards, contents = list[PoolCard](), list[Contents]()
        for _ in range(reader.number("u16", 1)):
            cards.append(read_card(reader))
            contents.append(Contents.read(reader, num_pages * cards[-1].page_size, len(cards[-1].layers)))
        own = num_pages, tuple(contents), reader.seed_id, tuple(cards), Sent(number, step, pages), first
        return cls(*own, reader.model)


MOST_PREPARED = 16  # loads that are under way
LoadKey = tuple[int, int, tuple[int, ...]]  # uid, length, pages


class PageSnapshots:
    """Packs and unpacks; everything that was written must be sealed before."""

    def __init__(
        self, state: CanaryState, record_store: RecordStore, ledger: Ledger, compares_content: bool, model: str = ""
    ) -> None:
        self._state, self._record_store, self._ledger = state, record_store, ledger
        self._compares_content, self._model = compares_content, model
        self._landings = Landings(state.records.device)
        self._recent, self.left = RecentSnapshots(), LeftRecords(state, record_store, ledger)
        #: By identity of the snapshot, the last ones; with the generations of the pages' grants.
        self._prepared: dict[int, tuple[PageSnapshot, LoadKey, bytes, list[Incoming]]] = {}
        self.poisoned: set[int] = set()  # pages that wait for a load, for which their poison vouched

    def pack(self, pages: Sequence[int], step: int, group: str | None = None) -> PageSnapshot:
        """What is known of these pages now, in all pools or in those of a group."""
        names, pools = self._slots(self._ledger.pages.numbers(pages)), self._pools(group)
        if group is not None:
            self.left.save(group, pages)
        sent = self._recent.number(step, tuple(pages))
        contents = tuple(self._contents(pool, names) for pool in pools)
        if self._compares_content:
            self._remember(sent, pools, contents)
        cards = tuple(card_of(pool.view) for pool in pools)
        return PageSnapshot(len(pages), contents, self._state.keys.seed_id, cards, sent, model=self._model)

    def _remember(self, sent: Sent, pools: Sequence[PoolState], contents: Sequence[Contents]) -> None:
        own = (SnapshotFingerprints(one.fingerprint_a, one.current) for one in contents)
        self._recent.remember(SentSnapshot(sent, dict(zip([pool.pool_id for pool in pools], own, strict=True))))

    def _pools(self, group: str | None) -> Sequence[PoolState]:
        return self._state.pools if group is None else self._state.pools_of(group)

    def expect_own(self, snapshots: Sequence[PageSnapshot], pages: Sequence[int], group: str | None = None) -> None:
        """ContradictionError unless snapshots come back into as many pages as left; ForeignSnapshotError for other
        keys, another model or other pools, with both sides.
        """
        _expect_of_pages(snapshots)
        num_pages = sum(snapshot.num_pages for snapshot in snapshots)
        if num_pages != len(pages):
            raise ContradictionError(
                f"a snapshot must come back into as many pages as it left, got {len(pages)} for {num_pages}: "
                "pack and load the same pages, in row order"
            )
        seed_id, layouts = self._state.keys.seed_id, tuple(card_of(pool.view) for pool in self._pools(group))
        for snapshot in snapshots:
            snapshot.expect(seed_id, self._model)
            if snapshot.layouts != layouts:
                expected, found = ("; ".join(map(str, own)) or "no pool" for own in (layouts, snapshot.layouts))
                raise ForeignSnapshotError(
                    f"a snapshot must come back into pools like those that it left, got one of {found} for {expected}: "
                    "load without a snapshot",
                    expected=expected,
                    found=found,
                )

    def take_prepared(
        self, snapshot: PageSnapshot, request: Request | None, pages: Sequence[int], length: int
    ) -> list[Incoming] | None:
        """What `prepare` has made of this load, which has come and is read from now on; None: nothing."""
        _, load, grants, incoming = self._prepared.pop(id(snapshot), (None, None, b"", []))
        if request is None or load != (request.uid, length, tuple(pages)) or grants != self._grants(pages):
            return None
        self._read(incoming)
        return incoming

    def bring(
        self, snapshot: PageSnapshot, request: Request, pages: Sequence[int], length: int, step: int
    ) -> list[Incoming]:
        """The same of a load that was not prepared.

        Positions below `length` have come. Slots that held nothing when they left hold nothing now.
        step: in which the load began
        """
        incoming = self._incoming(snapshot, request, pages, length, step)
        self._read(incoming)
        return incoming

    def unpack(
        self,
        how: str,
        snapshot: PageSnapshot,
        request: Request,
        pages: Sequence[int],
        length: int,
        step: int,
        incoming: Sequence[Incoming],
    ) -> list[Violation]:
        """The records follow their bytes into these pages of the row.

        T1 where what arrived is not what was written before it left.
        how: what brought them, in the words of a report
        """
        request.brought_len = max(request.brought_len, length)
        for one in incoming:
            one.write(self._record_store)
            pool_id, seen = one.pool.pool_id, window_start(one.pool.view, length)  # nobody misses what comes before
            request.row_lens[pool_id] = max(request.row_lens[pool_id], seen)
            self._ledger.rows.note_brought(request, pool_id, one.names, one.in_row, one.is_run)
        arrived_slots = {one.pool.name: one.differing() for one in incoming}
        violations = self._judge(how, [snapshot], pages, arrived_slots, [], step)
        if snapshot.sent.peer is not None and self._compares_content:
            self._remember(snapshot.sent, self._state.pools, snapshot.contents)
        return violations

    def prepare(self, snapshot: PageSnapshot, request: Request, pages: Sequence[int], length: int, step: int) -> None:
        """All of `bring` that can be done before the bytes are there; pools behind slot maps wait for theirs."""
        self.expect_own([snapshot], pages)
        if all(pool.view.slot_map is None for pool in self._state.pools):
            incoming = self._incoming(snapshot, request, pages, length, step)
            load = request.uid, length, tuple(pages)
            self._prepared[id(snapshot)] = snapshot, load, self._grants(pages), incoming
            while len(self._prepared) > MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]

    def _grants(self, pages: Sequence[int]) -> bytes:
        return self._ledger.generations[list(pages)].tobytes()

    def _incoming(
        self, snapshot: PageSnapshot, request: Request, pages: Sequence[int], length: int, step: int
    ) -> list[Incoming]:
        """By pool into which something comes back."""
        names = self._slots(np.array(pages, dtype=np.int64))
        positions = self._slots(np.array(self._ledger.rows.places(request, list(pages)), dtype=np.int64))  # in the row
        found = list[Incoming]()
        for pool, contents in zip(self._state.pools, snapshot.contents, strict=True):
            held = slots_in(pool.view, names) >= pool.view.null_slots  # a window may have left the others
            chosen = (contents.current & held & (positions < length)).nonzero()[0]
            if len(chosen):
                grants = self._ledger.generations[names[chosen] // self._state.page_size].view(np.uint64)
                records = contents.records[chosen]
                records[:, REQUEST_GENERATION] = two_words(request.uid, grants)
                own = contents, chosen, records, names[chosen], step, positions[chosen]
                found.append(Incoming(self._record_store, self._landings, pool, *own))
        return found

    def _read(self, incoming: Sequence[Incoming]) -> None:
        """First of all: the host goes on while the device reads."""
        for one in incoming if self._compares_content else ():
            one.read()

    def unpack_group(
        self, group: str, snapshots: Sequence[PageSnapshot], pages: Sequence[int], step: int
    ) -> list[Violation]:
        """The records of pages that have kept their grant follow their bytes to where the slot map leads now."""
        names = self._slots(self._ledger.pages.numbers(pages))
        incoming, outdated = list[Incoming](), list[Outdated]()
        for number, pool in enumerate(self._state.pools_of(group)):
            contents = joined([snapshot.contents[number] for snapshot in snapshots])
            if self._compares_content:
                outdated += self.left.outdated(pool, pages, contents.records)
            chosen = contents.current.nonzero()[0]
            if len(chosen):
                own = contents, chosen, contents.records[chosen], names[chosen], step
                incoming.append(Incoming(self._record_store, self._landings, pool, *own))
        self._read(incoming)
        for one in incoming:
            one.write(self._record_store)
        arrived_slots = {one.pool.name: one.differing() for one in incoming}
        return self._judge("swap in", snapshots, pages, arrived_slots, outdated, step)

    def _contents(self, pool: PoolState, names: Ints) -> Contents:
        slots = slots_in(pool.view, names).clip(0)
        where = torch.from_numpy(slots).to(pool.records.device)
        expected = pool.expected.index_select(0, where)
        records = self._record_store.table[pool.base + slots]
        grants = self._ledger.generations[names // self._state.page_size].view(np.uint64)
        return Contents(
            records,
            (pool.records.index_select(0, where) - expected).cpu(),
            pool.content_a.index_select(1, where).cpu(),
            expected.select(1, CONTENT_B).cpu(),
            records[:, REQUEST_GENERATION] >> 32 == grants,  # null slots never are: nobody is granted them
        )

    def _judge(
        self,
        how: str,
        snapshots: Sequence[PageSnapshot],
        pages: Sequence[int],
        arrived_slots: Mapping[str, ArrivedSlots | None],
        outdated: Sequence[Outdated],
        step: int,
    ) -> list[Violation]:
        """T1 for every slot that holds other bytes than those of then, all of them of one arrival."""
        was_poisoned = self.poisoned.intersection(pages)
        self.poisoned -= was_poisoned
        if not any(arrived_slots.values()) and not outdated:
            return []
        poisoned = np.array([page in was_poisoned for page in pages], np.bool_)
        left = [(snapshot.sent, snapshot.first + page) for snapshot in snapshots for page in range(snapshot.num_pages)]
        trip = Trip(how, step, self._state.page_size, [(*one, page) for one, page in zip(left, pages, strict=True)])
        arrival = judge(trip, arrived_slots, self._recent, poisoned, outdated)
        violations = [found for one in arrived_slots.values() if one for found in self._violations(one, arrival)]
        known = {(violation.pool.pool_id, violation.arrived_as) for violation in violations}
        violations += [
            self._violation(pool, arrival, place, slot, position, range(pool.view.num_layers))
            for pool, place, slot, position, _ in outdated
            if (pool.pool_id, place) not in known
        ]
        return _one_of_each_page_first(violations)

    def _violations(self, arrived_slots: ArrivedSlots, arrival: Arrival) -> Iterator[Violation]:
        differs, positions = arrived_slots.differs, arrived_slots.positions.tolist()
        places, slots = arrived_slots.places.tolist(), arrived_slots.slots.tolist()
        for n in np.flatnonzero(differs.any(0)).tolist():
            layers = np.flatnonzero(differs[:, n]).tolist()
            yield self._violation(arrived_slots.pool, arrival, places[n], slots[n], positions[n], layers)

    def _violation(
        self, pool: PoolState, arrival: Arrival, place: int, slot: int, position: int, layers: Iterable[int]
    ) -> Violation:
        trip = arrival.trip
        name = trip.pages[place // trip.page_size][2] * trip.page_size + place % trip.page_size
        named, holder = None if pool.view.slot_map is None else name, self._ledger.holder(name // trip.page_size)
        reader = None if holder is None else holder.request_id
        own = "T1", pool, slot, position, reader, ("load", 0), trip.step, tuple(layers)
        return Violation(*own, named=named, arrival=arrival, arrived_as=place)

    def _slots(self, pages: Ints) -> Ints:
        return slots_of_pages(pages, self._state.page_size)


def _expect_of_pages(snapshots: Sequence[Seal]) -> None:
    for snapshot in snapshots:
        if not isinstance(snapshot, PageSnapshot):
            raise ForeignSnapshotError(
                f"pages must come back with a {PageSnapshot.of} of pages, got a {snapshot.of}: give what on_offload "
                "returned for them",
                expected=PageSnapshot.of,
                found=snapshot.of,
            )


def _one_of_each_page_first(violations: list[Violation]) -> list[Violation]:
    """In the order in which they speak; where few are kept, none of the pages goes missing."""
    violations = sorted(violations, key=speaks_first)
    firsts = {(violation.pool.pool_id, violation.page): violation for violation in reversed(violations)}
    return [
        *sorted(firsts.values(), key=speaks_first),
        *(h for h in violations if firsts[h.pool.pool_id, h.page] is not h),
    ]
