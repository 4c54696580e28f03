"""Incoming: pages that come back with a snapshot. All but the comparison can be made ready while their bytes travel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.ledger.ledger import Request
from kvcanary.pools.slot_maps import Ints, slots_in
from kvcanary.provenance.arrival import ArrivedSlots
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.mailbox import to_device
from kvcanary.records.record_store import RecordStore, Words
from kvcanary.records.state import PoolState
from kvcanary.transfers.contents import Contents
from kvcanary_kernels.record.layout import TOKEN_POSITION


class Incoming:
    """What comes back into one pool: the chosen slots of a snapshot's contents, which the plans call `names`.

    in_row: [n] their positions in the row into which they come; without one those that the entries had
    """

    def __init__(
        self,
        pool: PoolState,
        contents: Contents,
        chosen: Ints,
        records: Words,
        names: Ints,
        in_row: Ints | None = None,
    ) -> None:
        """records: [n, 8] of then, with the row and the grant of now; they are written into"""
        own, device = contents.of(chosen), pool.records.device
        self.pool, self.names, self._positions = pool, names, positions_of(records)
        self.in_row = self._positions if in_row is None else in_row
        self._contents, self._own, self._chosen, self._records = contents, own, chosen, records
        self._slots = slots_in(pool.view, names)
        self._where = to_device(torch.from_numpy(self._slots), device)
        self._sent = to_device(own.fingerprint_a, device), to_device(own.fingerprint_b, device)
        self._damage = to_device(own.damage, device) if own.damage.numpy().any() else None
        self._before: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None

    def write(self, store: RecordStore, step: int) -> None:
        """The records and fingerprints of then; a damaged record stays damaged."""
        pool, where = self.pool, self._where
        self._before = pool.content_a.index_select(1, where)
        store.load(pool, self._slots, self._records, step)
        pool.write_fingerprints(where, *self._sent)
        if self._damage is not None:
            pool.records.index_copy_(0, where, pool.records.index_select(0, where) + self._damage)

    def read(self) -> None:
        """Begin to read what lies there; nobody waits for it yet."""
        self._found = fingerprints_of_slots(self.pool, self._where)

    def differing(self) -> ArrivedSlots | None:
        """What was read; None: the bytes of then, or nothing was read. Waits for the device."""
        if self._found is None or self._before is None or torch.equal(self._found[0], self._sent[0]):
            return None
        found_a, found_b, before = (values.cpu().numpy() for values in (*self._found, self._before))
        expected = self._own.fingerprint_a.numpy(), self._own.fingerprint_b.numpy()
        known = self._contents.fingerprint_a.numpy(), self._contents.current
        own = self._chosen, self._slots, self._positions, (found_a, found_b), expected, before
        return ArrivedSlots(self.pool, *own, *known)


class Prepared:
    """What `prepare_load` has made ready, for one call of `on_load_end` with the same arguments."""

    def __init__(self, request: Request, pages: Sequence[int], length: int, grants: NDArray[np.int64]) -> None:
        """grants: [pages] their generations"""
        self._own = request.uid, [*pages], length
        self._grants = grants.copy()
        self.incoming: list[Incoming] = []

    def is_of(self, request: Request, pages: Sequence[int], length: int, grants: NDArray[np.int64]) -> bool:
        """Whether it is of these, and the pages were not granted anew."""
        return self._own == (request.uid, [*pages], length) and np.array_equal(self._grants, grants)


def positions_of(records: Words) -> Ints:
    """[n] of records [n, 8]."""
    return (records[:, TOKEN_POSITION] >> 32).view(np.int64)
