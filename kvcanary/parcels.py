"""Parcels: what the canary knows of bytes that leave the pools for a while, to be compared when they come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.groups import slots_in, slots_of_pages, window_start
from kvcanary.hits import Hit
from kvcanary.lanes import lanes_of_slots
from kvcanary.ledger import Ledger, Request
from kvcanary.mirror import Mirror, Words, two_words
from kvcanary.sites import pack_site
from kvcanary.state import CanaryState, PoolState
from kvcanary_kernels.record import CONTENT_B, REQUEST_GENERATION, SEAL, STEP_SITE, TOKEN_POSITION


@dataclass(frozen=True, eq=False)
class Contents:
    """What one pool held for the parcel's pages, n slots in page order; on the host.

    records: [n, 8] as the canary wrote them
    damage:  [n, 8] int64, what the device's records were off by
    lane_a:  [layers, n] int64
    lane_b:  [n] int64
    current: [n] bool, written under the grant that the page had
    """

    records: Words
    damage: Tensor
    lane_a: Tensor
    lane_b: Tensor
    current: NDArray[np.bool_]

    def part(self, own: slice) -> Contents:
        """These slots alone."""
        return Contents(self.records[own], self.damage[own], self.lane_a[:, own], self.lane_b[own], self.current[own])


@dataclass(frozen=True, eq=False)
class Parcel:
    """Identity and fingerprints of whole pages, by pool. They name content, so they hold wherever it comes back."""

    num_pages: int
    contents: tuple[Contents, ...]

    def behind(self, page: int) -> Parcel:
        """The parcel of all but the first ``page`` pages, which need not come back."""
        return self._part(page, self.num_pages)

    def each(self) -> list[Parcel]:
        """A parcel for each page, in order."""
        return [self._part(page, page + 1) for page in range(self.num_pages)]

    def _part(self, first: int, end: int) -> Parcel:
        sizes = (len(contents.lane_b) // self.num_pages for contents in self.contents)
        parts = zip(self.contents, sizes, strict=True)
        return Parcel(end - first, tuple(one.part(slice(first * size, end * size)) for one, size in parts))


class Parcels:
    """Packs and unpacks; everything that was written must be sealed before."""

    def __init__(self, state: CanaryState, mirror: Mirror, ledger: Ledger, compares_content: bool) -> None:
        self._state, self._mirror, self._ledger = state, mirror, ledger
        self._compares_content = compares_content

    def pack(self, pages: Sequence[int], group: str | None = None) -> Parcel:
        """What is known of these pages now, in all pools or in those of a group."""
        names = self._slots(self._ledger.pages.numbers(pages))
        pools = self._state.pools if group is None else self._state.pools_of(group)
        return Parcel(len(pages), tuple(self._contents(pool, names) for pool in pools))

    def unpack(self, parcel: Parcel, request: Request, pages: Sequence[int], length: int, step: int) -> list[Hit]:
        """The records of positions below `length` follow their bytes into these pages of the row.

        T1 where what arrived is not what was written before it left. Slots that held nothing then hold nothing now.
        """
        names = self._slots(np.array(pages, dtype=np.int64))
        positions = self._positions(request, pages)
        hits: list[Hit] = []
        for pool, contents in zip(self._state.pools, parcel.contents, strict=True):
            held = slots_in(pool.view, names) >= pool.view.null_slots  # a window may have left the others
            chosen = (contents.current & held & (positions < length)).nonzero()[0]
            if len(chosen):
                seen = window_start(pool.view, length)  # nobody misses what comes before
                request.row_lens[pool.pool_id] = max(request.row_lens[pool.pool_id], seen)
                records = self._granted_anew(contents.records[chosen], request, names[chosen])
                self._write(pool, contents, chosen, records, names[chosen], step)
                self._ledger.note_moved(pool.pool_id, names[chosen], _positions_of(records))
                hits += self._compare(pool, contents, chosen, names[chosen], step)
        return hits

    def unpack_group(self, group: str, parcels: Sequence[Parcel], pages: Sequence[int], step: int) -> list[Hit]:
        """The records of pages that have kept their grant follow their bytes to where the slot map leads now."""
        names = self._slots(self._ledger.pages.numbers(pages))
        hits: list[Hit] = []
        for number, pool in enumerate(self._state.pools_of(group)):
            contents = _joined([parcel.contents[number] for parcel in parcels])
            chosen = contents.current.nonzero()[0]
            if len(chosen):
                self._write(pool, contents, chosen, contents.records[chosen], names[chosen], step)
                hits += self._compare(pool, contents, chosen, names[chosen], step)
        return hits

    def _contents(self, pool: PoolState, names: NDArray[np.int64]) -> Contents:
        slots = slots_in(pool.view, names).clip(0)
        where = torch.from_numpy(slots).to(pool.records.device)
        expected = pool.expected.index_select(0, where)
        records = self._mirror.table[pool.base + slots]
        grants = self._ledger.generations[names // self._state.page_size].view(np.uint64)
        return Contents(
            records,
            (pool.records.index_select(0, where) - expected).cpu(),
            pool.content_a.index_select(1, where).cpu(),
            expected.select(1, CONTENT_B).cpu(),
            records[:, REQUEST_GENERATION] >> 32 == grants,  # null slots never are: nobody is granted them
        )

    def _granted_anew(self, records: Words, request: Request, names: NDArray[np.int64]) -> Words:
        grants = self._ledger.generations[names // self._state.page_size].view(np.uint64)
        records[:, REQUEST_GENERATION] = two_words(request.uid, grants)
        return records

    def _write(
        self,
        pool: PoolState,
        contents: Contents,
        chosen: NDArray[np.int64],
        records: Words,
        names: NDArray[np.int64],
        step: int,
    ) -> None:
        """Seal the records of the chosen slots, which the plans call ``names``, with the fingerprints of then."""
        slots = slots_in(pool.view, names)
        device, taken = pool.records.device, torch.from_numpy(chosen)
        where = torch.from_numpy(slots).to(device)
        records[:, STEP_SITE] = two_words(step, pack_site("load", 0))
        records[:, CONTENT_B] = 0
        records[:, SEAL] = pool.seal_term
        self._mirror.write(pool.base + slots, records)
        self._mirror.flush()
        lanes = contents.lane_a.index_select(1, taken).to(device), contents.lane_b.index_select(0, taken).to(device)
        pool.write_lanes(where, *lanes)
        damage = contents.damage.index_select(0, taken).to(device)  # a damaged record stays damaged
        pool.records.index_copy_(0, where, pool.records.index_select(0, where) + damage)

    def _compare(
        self, pool: PoolState, contents: Contents, chosen: NDArray[np.int64], names: NDArray[np.int64], step: int
    ) -> list[Hit]:
        """T1 where the bytes of the chosen slots are not those of then."""
        if not self._compares_content:
            return []
        slots = slots_in(pool.view, names)
        where = torch.from_numpy(slots).to(pool.records.device)
        lane_a = contents.lane_a.index_select(1, torch.from_numpy(chosen)).to(where.device)
        differs = (lanes_of_slots(pool, where)[0] != lane_a).cpu()
        positions = _positions_of(contents.records[chosen])
        return [
            Hit(
                "T1",
                pool,
                int(slots[number]),
                int(positions[number]),
                self._reader(int(names[number])),
                ("load", 0),
                step,
                tuple(differs[:, number].nonzero().flatten().tolist()),
                named=None if pool.view.slot_map is None else int(names[number]),
            )
            for number in differs.any(0).nonzero().flatten().tolist()
        ]

    def _reader(self, name: int) -> str | None:
        holder = self._ledger.holder(name // self._state.page_size)
        return None if holder is None else holder.request_id

    def _slots(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        return slots_of_pages(pages, self._state.page_size)

    def _positions(self, request: Request, pages: Sequence[int]) -> NDArray[np.int64]:
        """By slot of these pages, where it stands in the row."""
        return self._slots(np.array([request.pages.index(page) for page in pages], dtype=np.int64))


def expect_fits(parcels: Sequence[Parcel], pages: Sequence[int]) -> None:
    """PlanError unless parcels come back into as many pages as left."""
    num_pages = sum(parcel.num_pages for parcel in parcels)
    if num_pages != len(pages):
        raise PlanError(
            f"a parcel must come back into as many pages as it left, got {len(pages)} for {num_pages}: "
            "pack and load the same pages, in row order"
        )


def _joined(contents: Sequence[Contents]) -> Contents:
    """One after the other."""
    return Contents(
        np.concatenate([one.records for one in contents]),
        torch.cat([one.damage for one in contents]),
        torch.cat([one.lane_a for one in contents], 1),
        torch.cat([one.lane_b for one in contents]),
        np.concatenate([one.current for one in contents]),
    )


def _positions_of(records: Words) -> NDArray[np.int64]:
    return (records[:, TOKEN_POSITION] >> 32).view(np.int64)
