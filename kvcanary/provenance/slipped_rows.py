"""Rows of one slot and layer, and as they were before a part slipped or came into another order.

What comes out is tried against what was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

from kvcanary.records.state import PoolState
from kvcanary_kernels.record.rows import WORD_BYTES, Piece

MOST_ROTATIONS = 32  # of the elements of a part


def row_of(pool: PoolState, layer: int, slot: int) -> Tensor:
    """[words] int32, as it lies there now."""
    return pool.rows.gather_layer(layer, torch.tensor([slot], device=pool.records.device))[0]


def span(piece: Piece) -> slice:
    """The words of a part within its row."""
    return slice(piece.first, piece.first + piece.words)


def ways_back(
    pool: PoolState, layer: int, slot: int, row: Tensor, num_parts: int, size: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """(parts that slipped, row [words] int32 before), forwards and backwards by `size` bytes.

    What slipped out at one end is taken from the row's other end, or from the slot into which a block would have gone.
    """
    if size >= WORD_BYTES * min(piece.words for piece in pool.rows.pieces[:num_parts]):
        return
    single = [(part,) for part in range(num_parts)]
    for parts in [*single, tuple(range(num_parts))] if num_parts > 1 else single:
        for step in (-size, size):
            yield parts, _slid(pool, row, row, parts, step)
            neighbour = slot + (1 if step < 0 else -1)
            if 0 <= neighbour < pool.view.num_slots:
                yield parts, _slid(pool, row, row_of(pool, layer, neighbour), parts, step)


def reordered(pool: PoolState, row: Tensor, num_parts: int) -> Iterator[tuple[str, Tensor]]:
    """(what happened, row [words] int32 before) of the parts behind the first `num_parts`, which are K and V.

    Two of them were exchanged, or the elements of one were reversed, rotated, or stored as a transposed matrix.
    """
    beside = list(zip(pool.rows.pieces, pool.view.parts, strict=True))[num_parts:]
    for (here, one), (there, other) in combinations(beside, 2):
        if here.words == there.words:
            before = row.clone()
            before[span(here)], before[span(there)] = row[span(there)], row[span(here)]
            yield f"its own {one.name} and {other.name}, exchanged", before
    for piece, part in beside:
        elements = row[span(piece)].view(torch.uint8).view(-1, part.dtype.itemsize)
        for order in _orders(len(elements)):
            before = row.clone()
            before[span(piece)] = elements[order].reshape(-1).view(torch.int32)
            yield f"its own {part.name}, in another order", before


def _orders(count: int) -> Iterator[Tensor]:
    """Orders of so many elements, few where there are many."""
    places = torch.arange(count)
    yield places.flip(0)
    for width in range(2, count):
        if count % width == 0:
            yield places.view(-1, width).T.flatten()
    for by in range(1, min(count, MOST_ROTATIONS)):
        yield places.roll(by)
        yield places.roll(-by)


def _slid(pool: PoolState, row: Tensor, other: Tensor, parts: tuple[int, ...], step: int) -> Tensor:
    """A row whose parts are moved by `step` bytes; what is missing comes from the other's far end."""
    moved = row.clone()
    for where in (span(pool.rows.pieces[part]) for part in parts):
        here, there = row[where].view(torch.uint8), other[where].view(torch.uint8)
        ends = (here[-step:], there[:-step]) if step < 0 else (there[-step:], here[:-step])
        moved[where] = torch.cat(ends).view(torch.int32)
    return moved
