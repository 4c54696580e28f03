"""Contents: what one pool held for pages whose bytes leave, as a snapshot keeps and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.pools.slot_maps import Ints
from kvcanary.records.record_store import Words
from kvcanary.transfers.wire import Reader, Writer
from kvcanary_kernels.record.layout import COLUMNS


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


def joined(contents: Sequence[Contents]) -> Contents:
    """One after the other."""
    return Contents(
        np.concatenate([one.records for one in contents]),
        torch.cat([one.damage for one in contents]),
        torch.cat([one.fingerprint_a for one in contents], 1),
        torch.cat([one.fingerprint_b for one in contents]),
        np.concatenate([one.current for one in contents]),
    )
