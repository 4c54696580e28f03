"""Contents: what one pool held for pages whose bytes leave, as a snapshot keeps it; `Incoming`: on its way back.

All but the comparison of what comes back can be made ready while its bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.pools.slot_maps import Ints, slots_in
from kvcanary.provenance.arrival import ArrivedSlots
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.landings import Landings
from kvcanary.records.mailbox import to_device
from kvcanary.records.record_store import RecordStore, Words
from kvcanary.records.state import PoolState
from kvcanary.transfers.wire import Reader, Writer
from kvcanary_kernels.record.layout import COLUMNS, CONTENT_B, TOKEN_POSITION


@dataclass(frozen=True, eq=False)
class Contents:
    """What one pool held for the snapshot's pages, n slots in page order; on the host.

    records: [n, 8] as the canary wrote them
    damage:  [n, 8] int64, what the device's records were off by
    fingerprint_a:  [layers, n] int64
    fingerprint_b:  [n] int64
    current: [n] bool, written under the grant that the page had
    """

    records: Words
    damage: Tensor
    fingerprint_a: Tensor
    fingerprint_b: Tensor
    current: NDArray[np.bool_]

    def part(self, own: slice) -> Contents:
        """These slots alone."""
        return Contents(
            self.records[own], self.damage[own], self.fingerprint_a[:, own], self.fingerprint_b[own], self.current[own]
        )

    def of(self, chosen: Ints) -> Contents:
        """Slots with these numbers, which ascend: itself where they are all."""
        if len(chosen) == len(self.current):
            return self
        taken = torch.from_numpy(chosen)
        return Contents(
            self.records[chosen],
            self.damage.index_select(0, taken),
            self.fingerprint_a.index_select(1, taken),
            self.fingerprint_b.index_select(0, taken),
            self.current[chosen],
        )

    def write(self, writer: Writer) -> None:
        """Damage is nearly always nothing, and has a flag for that."""
        damage = self.damage.numpy()
        writer.number("u16", int(damage.any()))
        for values in (self.records.view(np.int64), *([damage] if damage.any() else [])):
            writer.array(values, "<i8")
        for tensor in (self.fingerprint_a, self.fingerprint_b):
            writer.array(tensor.numpy(), "<i8")
        writer.array(np.packbits(self.current), "u1")

    @classmethod
    def read(cls, reader: Reader, n: int, num_layers: int) -> Contents:
        """Of n slots."""
        is_damaged = reader.number("u16", 0, 1)
        records = reader.array("<i8", n, COLUMNS)
        damage = reader.array("<i8", n, COLUMNS) if is_damaged else np.zeros_like(records)
        fingerprint_a, fingerprint_b = reader.array("<i8", num_layers, n), reader.array("<i8", n)
        current = np.unpackbits(reader.array("u1", -(-n // 8)), count=n).astype(np.bool_)
        damages, a, b = (torch.from_numpy(array) for array in (damage, fingerprint_a, fingerprint_b))
        return cls(records.view(np.uint64), damages, a, b, current)


class Incoming:
    """What comes back into one pool: the chosen slots of a snapshot's contents, which the plans call `names`.

    in_row: [n] their positions in the row into which they come; without one those that the entries had
    """

    def __init__(
        self,
        store: RecordStore,
        landings: Landings,
        pool: PoolState,
        contents: Contents,
        chosen: Ints,
        records: Words,
        names: Ints,
        step: int,
        in_row: Ints | None = None,
    ) -> None:
        """records: [n, 8] of then, with the row and the grant of now, which are written into;  step: of their load"""
        own = contents.of(chosen)
        self.pool, self.names, self._positions = pool, names, positions_of(records)
        self.in_row = self._positions if in_row is None else in_row
        self.is_run = bool((np.diff(self.in_row) == 1).all())
        self._contents, self._own, self._chosen, self._records = contents, own, chosen, records
        self._slots, self._is_read = slots_in(pool.view, names), False
        records[:, CONTENT_B] = own.fingerprint_b.numpy().view(np.uint64)
        store.seal_loaded(pool, self._slots, records, step)
        self._landing = landings.take(pool, len(names), self)
        self._landing.fill(self._slots, records.view(np.int64), own.fingerprint_a.numpy())
        self._where = self._landing.where[: len(names)]
        self._damage = to_device(own.damage, self._where.device) if own.damage.numpy().any() else None
        self._before = pool.content_a.index_select(1, self._where)

    def read(self) -> None:
        """Begin to read what lies there; nobody waits for it yet."""
        self._landing.read()
        self._is_read = True

    def write(self, store: RecordStore) -> None:
        """The records and fingerprints of then; a damaged record stays damaged."""
        pool, where = self.pool, self._where
        store.put(pool, self._slots, self._records)
        self._landing.write()
        if self._damage is not None:
            pool.records.index_copy_(0, where, pool.records.index_select(0, where) + self._damage)

    def differing(self) -> ArrivedSlots | None:
        """What was read; None: the bytes of then, or nothing was read. Waits for the device."""
        if not self._is_read or self._landing.is_right():
            return None
        _, read_b = fingerprints_of_slots(self.pool, self._where)
        read_a = self._landing.found_a[:, : len(self.names)]
        found_a, found_b, before = (values.cpu().numpy() for values in (read_a, read_b, self._before))
        expected = self._own.fingerprint_a.numpy(), self._own.fingerprint_b.numpy()
        known = self._contents.fingerprint_a.numpy(), self._contents.current
        own = self._chosen, self._slots, self._positions, (found_a, found_b), expected, before
        return ArrivedSlots(self.pool, *own, *known)


def positions_of(records: Words) -> Ints:
    """[n] of records [n, 8]."""
    return (records[:, TOKEN_POSITION] >> 32).view(np.int64)


def joined(contents: Sequence[Contents]) -> Contents:
    """One after the other."""
    return Contents(
        np.concatenate([one.records for one in contents]),
        torch.cat([one.damage for one in contents]),
        torch.cat([one.fingerprint_a for one in contents], 1),
        torch.cat([one.fingerprint_b for one in contents]),
        np.concatenate([one.current for one in contents]),
    )
