"""Tensors of an object, whatever holds them: a flat row of bytes each, with a name, and how these are cut into rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.transfers.object_seals import MOST_ROW_BYTES, NO_LAYER, TensorCard

LEAST_ROW_BYTES = 1024
MOST_CUTS = 64  # of an entry that is too long for a row
ANONYMOUS = "tensor"
Tensors = Any  # a tensor, an array, bytes, or mappings and sequences of these


@dataclass(frozen=True, eq=False)
class Flat:
    """The bytes of one tensor in the order of its elements, a copy only where it has to be.

    data: [bytes] uint8 in host memory, or a tensor of them on another device
    """

    part: str
    layer: int
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8] | Tensor

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    @property
    def name(self) -> tuple[str, int]:
        return self.part, self.layer

    @property
    def is_plain(self) -> bool:
        """One dimension says nothing of a layout."""
        return len(self.shape) == 1

    def card(self) -> TensorCard:
        entry = self.num_bytes // self.shape[0] if len(self.shape) > 1 and self.shape[0] else 0
        return TensorCard(self.part, self.layer, self.dtype, self.shape, self.num_bytes, row_bytes(entry))


def flats_of(tensors: Tensors) -> list[Flat]:
    """In the order in which they are given. PlanError for what has no bytes, or none of its own."""
    flats = [_flat(path, value) for path, value in _leaves(tensors, ())]
    names = [flat.name for flat in flats]
    if len(set(names)) != len(names):
        raise PlanError(f"tensors of an object must have different names, got {names[:8]}: give a mapping of names")
    return flats


def row_bytes(entry: int) -> int:
    """Of a tensor whose entries of the first dimension are so long, 0 where it has none: rows end where these end."""
    if entry % 4 or not entry:
        return MOST_ROW_BYTES // 4
    if entry < LEAST_ROW_BYTES:
        return entry * (LEAST_ROW_BYTES // entry)
    cuts = range(-(-entry // MOST_ROW_BYTES), MOST_CUTS + 1)
    return next(
        (entry // cut for cut in cuts if entry % (4 * cut) == 0 and entry // cut <= MOST_ROW_BYTES), MOST_ROW_BYTES
    )


def split(flat: Flat, cards: Sequence[TensorCard]) -> list[Flat]:
    """Bytes that are those of several tensors one after the other, as a file has them."""
    ends = np.cumsum([card.num_bytes for card in cards]).tolist()
    pairs = zip([0, *ends], [*ends[:-1], max(ends[-1], flat.num_bytes)], cards, strict=False)
    return [
        Flat(card.part, card.layer, "uint8", (max(0, min(end, flat.num_bytes) - start),), flat.data[start:end])
        for start, end, card in pairs
    ]


def _leaves(value: Tensors, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview | str):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, number))
    else:
        yield path, value


def _flat(path: tuple[str | int, ...], value: Any) -> Flat:
    """The first number in its path is the layer."""
    numbers = [place for place, name in enumerate(path) if isinstance(name, int)]
    layer = int(path[numbers[0]]) if numbers else NO_LAYER
    names = [str(name) for place, name in enumerate(path) if place not in numbers[:1]]
    own = ".".join(names) or ANONYMOUS, layer
    if isinstance(value, Tensor):
        return Flat(*own, str(value.dtype).removeprefix("torch."), tuple(value.shape), _of_tensor(value))
    if isinstance(value, bytes | bytearray | memoryview):
        value = np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise PlanError(f"{'.'.join(map(str, path)) or 'an object'} must be a tensor, an array or bytes, got {kind}")
    flat = np.ascontiguousarray(value).reshape(-1)
    return Flat(*own, str(value.dtype), tuple(value.shape), _aligned(flat.view(np.uint8) if flat.size else _NOTHING))


def _of_tensor(value: Tensor) -> NDArray[np.uint8] | Tensor:
    if value.layout is not torch.strided or value.is_quantized:
        raise PlanError(f"a tensor must be dense, got {value.layout}: give the tensors that it is made of")
    with torch.inference_mode():
        dense = value.detach().resolve_conj().resolve_neg().contiguous()
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # single elements may have any stride
    return _aligned(flat.numpy()) if flat.is_cpu else flat


def _aligned(flat: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """As compiled loops read words."""
    return flat.copy() if flat.ctypes.data % 4 else flat


_NOTHING = np.empty(0, np.uint8)


def elements(shape: Sequence[int]) -> int:
    return prod(shape)
