"""Slips: rows as they were before K, V or both slipped by some bytes, to be tried against what was written."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvcanary.state import PoolState
from kvcanary_kernels.rows import WORD_BYTES


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
            for other in (row, _neighbour(pool, layer, slot + (1 if step < 0 else -1))):
                if other is not None:
                    yield parts, _slid(pool, row, other, parts, step)


def _neighbour(pool: PoolState, layer: int, slot: int) -> Tensor | None:
    """The row of a slot, where the pool has it."""
    if not 0 <= slot < pool.view.num_slots:
        return None
    return pool.rows.gather_layer(layer, torch.tensor([slot], device=pool.records.device))[0]


def _slid(pool: PoolState, row: Tensor, other: Tensor, parts: tuple[int, ...], step: int) -> Tensor:
    """A row whose parts are moved by `step` bytes; what is missing comes from the other's far end."""
    moved = row.clone()
    for part in parts:
        piece = pool.rows.pieces[part]
        where = slice(piece.first, piece.first + piece.words)
        here, there = row[where].view(torch.uint8), other[where].view(torch.uint8)
        ends = (here[-step:], there[:-step]) if step < 0 else (there[-step:], here[:-step])
        moved[where] = torch.cat(ends).view(torch.int32)
    return moved
