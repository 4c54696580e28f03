"""Parcels: what the canary knows of bytes that leave the pools for a while, to be compared when they come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.groups import slots_in, window_start
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

    def behind(self, slot: int) -> Contents:
        """All but the first ``slot`` slots."""
        own = self.records[slot:], self.damage[slot:], self.lane_a[:, slot:], self.lane_b[slot:], self.current[slot:]
        return Contents(*own)


@dataclass(frozen=True, eq=False)
class Parcel:
    """Identity and fingerprints of whole pages, by pool. They name content, so they hold wherever it comes back."""

    num_pages: int
    contents: tuple[Contents, ...]

    def behind(self, page: int) -> Parcel:
        """The parcel of all but the first ``page`` pages, which need not come back."""
        parts = (contents.behind(page * len(contents.lane_b) // self.num_pages) for contents in self.contents)
        return Parcel(self.num_pages - page, tuple(parts))


class Parcels:
    """Packs and unpacks; everything that was written must be sealed before."""

    def __init__(self, state: CanaryState, mirror: Mirror, ledger: Ledger, compares_content: bool) -> None:
        self._state, self._mirror, self._ledger = state, mirror, ledger
        self._compares_content = compares_content

    def pack(self, pages: Sequence[int]) -> Parcel:
        """What is known of these pages now."""
        names = self._slots(self._ledger.pages.numbers(pages))
        return Parcel(len(pages), tuple(self._contents(pool, names) for pool in self._state.pools))

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
                hits += self._unpack(pool, contents, chosen, request, names[chosen], step)
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

    def _unpack(
        self,
        pool: PoolState,
        contents: Contents,
        chosen: NDArray[np.int64],
        request: Request,
        names: NDArray[np.int64],
        step: int,
    ) -> list[Hit]:
        slots = slots_in(pool.view, names)
        device, taken = pool.records.device, torch.from_numpy(chosen)
        where, lane_a = torch.from_numpy(slots).to(device), contents.lane_a.index_select(1, taken).to(device)
        records = contents.records[chosen]
        positions = (records[:, TOKEN_POSITION] >> 32).view(np.int64)
        grants = self._ledger.generations[names // self._state.page_size].view(np.uint64)
        records[:, REQUEST_GENERATION] = two_words(request.uid, grants)
        records[:, STEP_SITE] = two_words(step, pack_site("load", 0))
        records[:, CONTENT_B] = 0
        records[:, SEAL] = pool.seal_term
        self._mirror.write(pool.base + slots, records)
        self._mirror.flush()
        pool.write_lanes(where, lane_a, contents.lane_b.index_select(0, taken).to(device))
        damage = contents.damage.index_select(0, taken).to(device)  # a damaged record stays damaged
        pool.records.index_copy_(0, where, pool.records.index_select(0, where) + damage)
        self._ledger.note_moved(pool.pool_id, names, positions)
        if not self._compares_content:
            return []
        differs = (lanes_of_slots(pool, where)[0] != lane_a).cpu()
        wrong = differs.any(0).nonzero().flatten().tolist()
        return [
            Hit(
                "T1",
                pool,
                int(slots[number]),
                int(positions[number]),
                request.request_id,
                ("load", 0),
                step,
                tuple(differs[:, number].nonzero().flatten().tolist()),
                named=None if pool.view.slot_map is None else int(names[number]),
            )
            for number in wrong
        ]

    def _slots(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self._state.page_size
        return (pages[:, None] * size + np.arange(size)).ravel()

    def _positions(self, request: Request, pages: Sequence[int]) -> NDArray[np.int64]:
        """By slot of these pages, where it stands in the row."""
        return self._slots(np.array([request.pages.index(page) for page in pages], dtype=np.int64))


def expect_fits(parcel: Parcel, pages: Sequence[int]) -> None:
    """PlanError unless a parcel comes back into as many pages as it left."""
    if parcel.num_pages != len(pages):
        raise PlanError(
            f"a parcel must come back into as many pages as it left, got {len(pages)} for {parcel.num_pages}: "
            "pack and load the same pages, in row order"
        )
