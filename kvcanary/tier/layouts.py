"""Layouts: a tensor that came back whole, with its axes, or the order along one, changed; undone, and proved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvcanary.tier.row_sums import RowSums
from kvcanary.tier.tensors import Flat
from kvcanary.transfers.object_seals import Longs, TensorCard

SAMPLE = 4  # wrong rows that an answer must explain before all are asked
MOST_AXES = 5  # of more than one entry, of which every order is tried
MOST_HEADS, LEAST_DIM = 64, 4  # that a last axis may hold together
MOST_SHIFTS = 8  # along an axis, either way
MOST_BYTES = 64 << 20  # of a tensor whose layouts are tried

Elements = NDArray[np.void]


def layout_that_explains(
    sums: RowSums, card: TensorCard, sealed: Longs, data: NDArray[np.uint8], rows: Sequence[int]
) -> str:
    """What was done to the axes of this tensor, where undoing it gives its wrong rows as they left; empty: nothing."""
    count = prod(card.shape)
    if not count or not len(data) or len(data) % count or len(data) > MOST_BYTES:
        return ""
    elements = data.view(f"V{len(data) // count}")
    for text, undone in _ways_back(elements, card.shape):
        if _explains(sums, card, sealed, undone, rows):
            return text
    return ""


def _explains(sums: RowSums, card: TensorCard, sealed: Longs, undone: Elements, rows: Sequence[int]) -> bool:
    size, per_row = undone.dtype.itemsize, card.row_bytes // undone.dtype.itemsize
    if card.row_bytes % size:
        return False
    flat, most = undone.flat, undone.size
    for row in rows[:SAMPLE]:
        part = np.ascontiguousarray(flat[row * per_row : min((row + 1) * per_row, most)])
        found = sums.of(Flat(card.part, card.layer, card.dtype, (1,), part.view(np.uint8)), card.row_bytes)
        if not np.array_equal(found[:, 0], sealed[:, row]):
            return False
    return True


def _ways_back(elements: Elements, shape: tuple[int, ...]) -> Iterator[tuple[str, Elements]]:
    """What may have happened, and the tensor as it would have left then."""
    lies = elements.reshape(shape)
    for axis, size in enumerate(shape):
        yield f"axis {axis} of {list(shape)} is in the reverse order", np.flip(lies, axis)
        shifts = range(1, min(MOST_SHIFTS + 1, size // 2 + 1))
        for shift in (one for by in shifts for one in (by, -by)):
            yield f"axis {axis} of {list(shape)} is shifted by {shift}", np.roll(lies, -shift, axis)
    for sizes in (shape, *_with_heads(shape)):
        yield from _other_orders(elements, sizes)
    size = elements.dtype.itemsize
    if size > 1:
        swapped = (
            np.ascontiguousarray(elements.view(np.uint8).reshape(-1, size)[:, ::-1]).reshape(-1).view(elements.dtype)
        )
        yield f"the bytes of each element, {size} of them, are in the reverse order", swapped.reshape(shape)


def _other_orders(elements: Elements, shape: tuple[int, ...]) -> Iterator[tuple[str, Elements]]:
    """With its axes in every other order."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    sizes = [shape[axis] for axis in axes]
    for order in permutations(range(len(axes))) if len(axes) <= MOST_AXES else ():
        if order != tuple(range(len(axes))):
            back = elements.reshape([sizes[axis] for axis in order]).transpose(np.argsort(order))
            named = [axes[axis] for axis in order]
            yield f"its axes lie in the order {named}, and were read as {axes} of {list(shape)}", back


def _with_heads(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """With the last axis cut into heads of every likely size: shapes seldom say how many there are."""
    last = shape[-1] if shape else 0
    for heads in range(2, min(MOST_HEADS, last // LEAST_DIM) + 1):
        if last % heads == 0:
            yield (*shape[:-1], heads, last // heads)
