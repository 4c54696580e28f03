"""What came back of an object, tensor by tensor, against what its seal says."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from kvcanary.tier.row_sums import RowSums
from kvcanary.tier.tensors import Flat, split
from kvcanary.tier.whose import Came
from kvcanary.transfers.object_seals import Longs, ObjectSeal, TensorCard

SHOWN = 4


def came_back(sums: RowSums, seal: ObjectSeal, flats: Sequence[Flat]) -> tuple[list[Came], list[Flat]]:
    """One for each tensor of the seal, and what came for none."""
    own, surplus = _paired(seal.cards, flats)
    came = [
        _came(sums, card, sealed, flat) for card, sealed, flat in zip(seal.cards, seal.fingerprints, own, strict=True)
    ]
    if surplus and came and not any(one.wrong for one in came):
        named = ", ".join(flat.part for flat in surplus[:SHOWN])
        came[0].text = f"{len(surplus)} tensors came back that did not leave: {named}"
    return came, surplus


def _paired(cards: Sequence[TensorCard], flats: Sequence[Flat]) -> tuple[list[Flat | None], list[Flat]]:
    """By tensor of the seal what came for it, and what came for none: by name; in order, where all names are others."""
    if len(flats) == 1 and len(cards) > 1 and flats[0].is_plain:
        return [*split(flats[0], cards)], []
    named = {flat.name: flat for flat in flats}
    wanted = [(card.part, card.layer) for card in cards]
    if len(flats) == len(cards) and named.keys().isdisjoint(wanted):
        return [*flats], []
    return [named.get(name) for name in wanted], [flat for flat in flats if flat.name not in wanted]


def _came(sums: RowSums, card: TensorCard, sealed: Longs, flat: Flat | None) -> Came:
    rows = np.empty((2, 0), np.int64)
    if flat is not None and flat.num_bytes >= card.num_bytes:
        rows = sums.of(_cut(flat, card.num_bytes), card.row_bytes)
    elif flat is not None:
        rows = sums.of(_cut(flat, flat.num_bytes // card.row_bytes * card.row_bytes), card.row_bytes)
    wrong = np.flatnonzero((rows != sealed[:, : rows.shape[1]]).any(0)).tolist()
    wrong += range(rows.shape[1], sealed.shape[1])
    return Came(card, sealed, flat, rows, _other(card, flat), wrong)


def _cut(flat: Flat, count: int) -> Flat:
    return flat if flat.num_bytes == count else Flat(flat.part, flat.layer, flat.dtype, (count,), flat.data[:count])


def _other(card: TensorCard, flat: Flat | None) -> str:
    """What says that a tensor lies otherwise than it left, though its bytes be the same."""
    if flat is None or flat.num_bytes < card.num_bytes:
        return ""
    if flat.num_bytes > card.num_bytes:
        return f"{flat.num_bytes} bytes came back for the {card.num_bytes} of {card.label}"
    is_plain = flat.is_plain or len(card.shape) == 1
    same_type = flat.dtype == card.dtype or _is_bits(flat.dtype) or _is_bits(card.dtype)
    if (is_plain or _in_bytes(flat.shape, flat.num_bytes) == _in_bytes(card.shape, card.num_bytes)) and same_type:
        return ""
    left, came = (f"{list(shape)} {dtype}" for shape, dtype in ((card.shape, card.dtype), (flat.shape, flat.dtype)))
    return f"{card.label} left as {left}, and came back as {came}"


def _in_bytes(shape: Sequence[int], num_bytes: int) -> list[int]:
    """With the last dimension in bytes: views of the same memory as other types are alike."""
    size = num_bytes // prod(shape) if prod(shape) else 1
    return [*shape[:-1], shape[-1] * size] if shape else [size]


def _is_bits(dtype: str) -> bool:
    """Whether a type says nothing of what its bits mean, as numpy's have to for bfloat16."""
    own = getattr(torch, dtype, None)
    return not isinstance(own, torch.dtype) or not (own.is_floating_point or own.is_complex)
