"""ObjectSeals: what is known of the tensors of one object that goes to a store, row by row of its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvcanary.errors import SealError
from kvcanary.transfers.seal import Seal
from kvcanary.transfers.wire import Reader, Writer

MOST_ROW_BYTES = 1 << 16
MOST_DIMS = 64
NO_LAYER = -1

Longs = NDArray[np.int64]


class TensorCard(NamedTuple):
    """One tensor: its bytes in the order of its elements, cut into rows; the last may be shorter.

    layer: NO_LAYER (-1) where the object is no list of layers
    """

    part: str
    layer: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return -(-self.num_bytes // self.row_bytes)

    @property
    def label(self) -> str:
        return self.part if self.layer == NO_LAYER else f"{self.part} of layer {self.layer}"

    @property
    def entry_bytes(self) -> int:
        """Of one entry of its first dimension, which may be a page; of all where there is but one dimension."""
        return max(1, self.num_bytes // self.shape[0] if len(self.shape) > 1 and self.shape[0] else self.num_bytes)


@dataclass(frozen=True, eq=False)
class ObjectSeal(Seal):
    """key: under which it was put;  number: how manieth put of its tier;  origin: 16 hex digits of that tier's own
    identity: what else the bytes belong to, by name
    fingerprints: by tensor [2, rows] int64, a and b; the same bytes have the same wherever they lie
    """

    kind, of = 2, "seal of a tier"

    seed_id: str
    model: str
    key: str
    number: int
    origin: str
    identity: tuple[tuple[str, str], ...]
    cards: tuple[TensorCard, ...]
    fingerprints: tuple[Longs, ...]

    @property
    def num_bytes(self) -> int:
        """Of what it seals."""
        return sum(card.num_bytes for card in self.cards)

    def holds_what(self, other: ObjectSeal) -> bool:
        """Whether the other seals the same bytes."""
        return len(self.fingerprints) == len(other.fingerprints) and all(
            map(np.array_equal, self.fingerprints, other.fingerprints)
        )

    def _write(self, writer: Writer) -> None:
        writer.text(self.key)
        writer.number("u64", self.number)
        writer.text(self.origin)
        writer.number("u16", len(self.identity))
        for name, value in self.identity:
            writer.text(name)
            writer.text(value)
        writer.number("u32", len(self.cards))
        for card, fingerprints in zip(self.cards, self.fingerprints, strict=True):
            writer.text(card.part)
            writer.text(card.dtype)
            writer.number("u32", card.layer + 1)
            writer.number("u16", len(card.shape))
            for number in (*card.shape, card.num_bytes, card.row_bytes):
                writer.number("u64", number)
            writer.array(fingerprints, "<i8")

    @classmethod
    def _read(cls, reader: Reader) -> Self:
        key, number, origin = reader.text(), reader.number("u64"), reader.text()
        identity = tuple((reader.text(), reader.text()) for _ in range(reader.number("u16")))
        cards, fingerprints = list[TensorCard](), list[Longs]()
        for _ in range(reader.number("u32")):
            part, dtype, layer = reader.text(), reader.text(), reader.number("u32") - 1
            shape = tuple(reader.number("u64") for _ in range(reader.number("u16", 0, MOST_DIMS)))
            cards.append(
                TensorCard(part, layer, dtype, shape, reader.number("u64"), reader.number("u64", 4, MOST_ROW_BYTES))
            )
            if cards[-1].row_bytes % 4:
                raise SealError(
                    f"rows of a seal must be whole words, got {cards[-1].row_bytes} bytes: nothing was read"
                )
            fingerprints.append(reader.array("<i8", 2, cards[-1].num_rows))
        return cls(reader.seed_id, reader.model, key, number, origin, identity, tuple(cards), tuple(fingerprints))
