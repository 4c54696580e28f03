"""Cards: what the rows of a pool are, in words that another process can compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcanary.errors import SealError
from kvcanary.pools.views import PoolView
from kvcanary.transfers.wire import Reader, Writer
from kvcanary_kernels.record.layout import MAX_LAYERS, MAX_WORDS_PER_ROW

MOST_PARTS = 64
MOST_DIMS = 8


class PartCard(NamedTuple):
    """K, V or an extra; shape: of one slot's value in one layer, heads first."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.shape)) or '1'} {self.dtype}"


@dataclass(frozen=True)
class PoolCard:
    """One pool.

    words:       32-bit words of a row
    layers:      their numbers in the whole model
    first_head, whole_heads: those of a shard among those of the whole model
    """

    name: str
    page_size: int
    token_offset: int
    words: int
    layers: tuple[int, ...]
    first_head: int
    whole_heads: int
    parts: tuple[PartCard, ...]

    @property
    def heads(self) -> int:
        """KV heads that it holds."""
        return self.parts[0].shape[0] if self.parts[0].shape else 1

    @property
    def end_head(self) -> int:
        return self.first_head + self.heads

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.parts))
        text = f"{self.name}: {len(self.layers)} layers of {self.words} words ({parts}), pages of {self.page_size}"
        if self.whole_heads != self.heads:
            text += f", heads {self.first_head} to {self.end_head - 1} of {self.whole_heads}"
        if self.layers != tuple(range(len(self.layers))):
            text += f", layers {self.layers[0]} to {self.layers[-1]} of the model"
        return text + (f", one token ahead by {self.token_offset}" if self.token_offset else "")

    def write(self, writer: Writer) -> None:
        writer.text(self.name)
        for number in (self.page_size, self.token_offset, self.words, self.first_head, self.whole_heads):
            writer.number("u32", number)
        writer.number("u16", len(self.layers))
        for layer in self.layers:
            writer.number("u32", layer)
        writer.number("u16", len(self.parts))
        for part in self.parts:
            writer.text(part.name)
            writer.text(part.dtype)
            writer.number("u16", len(part.shape))
            for size in part.shape:
                writer.number("u32", size)


def card_of(view: PoolView) -> PoolCard:
    """That of a pool, whatever layout its memory has: fingerprints are of rows in logical order."""
    parts = (PartCard(part.name, str(part.dtype).removeprefix("torch."), part.shape) for part in view.parts)
    share, words = view.share, view.rows.words_per_row
    own = view.page_size, view.token_offset, words, share.layers, share.first_head, share.whole_heads
    return PoolCard(view.name, *own, tuple(parts))


def read_card(reader: Reader) -> PoolCard:
    """What `write` has written; SealError where no pool is so."""
    name = reader.text()
    page_size, token_offset = reader.number("u32", 1), reader.number("u32")
    words = reader.number("u32", 1, MAX_WORDS_PER_ROW)
    first_head, whole_heads = reader.number("u32"), reader.number("u32")
    layers = tuple(reader.number("u32") for _ in range(reader.number("u16", 1, MAX_LAYERS)))
    parts = []
    for _ in range(reader.number("u16", 1, MOST_PARTS)):
        part, dtype = reader.text(), reader.text()
        parts.append(PartCard(part, dtype, tuple(_sizes(reader))))
    if len(set(layers)) != len(layers):
        raise SealError(f"layers of a seal must be different, got {list(layers)[:8]}: nothing was read")
    return PoolCard(name, page_size, token_offset, words, layers, first_head, whole_heads, tuple(parts))


def _sizes(reader: Reader) -> list[int]:
    return [reader.number("u32") for _ in range(reader.number("u16", 0, MOST_DIMS))]
