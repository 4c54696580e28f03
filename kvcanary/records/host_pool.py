"""HostPool: a pool in host memory as the compiled loops take it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.native.layout import POOL, filled
from kvcanary.pools.views import PoolView
from kvcanary_kernels.record.formats import formats_of
from kvcanary_kernels.record.layout import Keys, signed
from kvcanary_kernels.record.rows import WORD_BYTES

Longs = NDArray[np.int64]
Shape = tuple[int, ...]
Geometry = tuple[Shape, Shape, torch.dtype, Shape, Shape, torch.dtype, bool]  # of K, of V, and whether both are here
MOST_GEOMETRIES = 256


class DensePart(NamedTuple):
    """Values of one part of a row as a loop can read them: type, shape and strides, bytes an element, words."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    inner: tuple[int, ...]
    size: int
    words: int


class Steps(dict[Geometry, tuple[int, int] | None]):
    """Bytes from row to row of K and of V, by how both lie in memory; None: not as a pool of these parts holds them.

    What was asked lately is kept.
    """

    def __init__(self, parts: tuple[DensePart, ...]) -> None:
        super().__init__()
        self._parts = parts

    def __missing__(self, geometry: Geometry) -> tuple[int, int] | None:
        if len(self) == MOST_GEOMETRIES:
            self.clear()
        steps = self[geometry] = self._steps(geometry)
        return steps

    def _steps(self, geometry: Geometry) -> tuple[int, int] | None:
        k_shape, k_stride, k_type, v_shape, v_stride, v_type, is_cpu = geometry
        if len(self._parts) != 2 or not is_cpu:
            return None
        own, other = self._parts
        asked = (k_shape[1:], k_stride[1:], k_type, v_shape, v_stride[1:], v_type)
        if asked != (own.shape, own.inner, own.dtype, (k_shape[0], *other.shape), other.inner, other.dtype):
            return None
        return k_stride[0] * own.size, v_stride[0] * other.size


class HostPool:
    """Arrays over the memory of one pool's tensors, and numbers that loops are given by value; all int64.

    parts:      of a row;  steps: of values as a model gives them
    address:    [pieces, layers] of slot 0
    layout:     [pieces, fields] what each `Piece` of a row says
    formats:    [pieces, fields] of each `Format`
    keys:       [layers, 2, words] int32, of fingerprint a and fingerprint b
    layer_keys: by layer, the address of its keys
    start_a:    [layers], and the same as integers: `starts`
    content_a:  [layers, num_slots]
    records, expected: [num_slots, 8]
    """

    def __init__(self, view: PoolView, keys: Keys, content_a: Tensor, records: Tensor, expected: Tensor) -> None:
        """All in host memory."""
        self.parts = tuple(_dense_part(part.shape, part.dtype) for part in view.parts)
        self.steps = Steps(self.parts)
        self.address: Longs = view.rows.ptrs.numpy()
        self.layout = np.array(view.rows.pieces, np.int64)
        self.keys = torch.stack([keys.fingerprint_a, keys.fingerprint_b], 1)
        self.layer_keys = [layer.data_ptr() for layer in self.keys]
        self.words = view.rows.words_per_row
        self.formats = np.array(formats_of(view.rows), np.int64)
        self.start_a: Longs = keys.start_a.numpy()
        self.starts: list[int] = keys.start_a.tolist()
        self.start_b = signed(keys.start_b)
        self.content_a: Longs = content_a.numpy()
        self.records: Longs = records.numpy()
        self.expected: Longs = expected.numpy()


def pool_struct(view: PoolView, host: HostPool | None, seen: NDArray[np.bool_], **numbers: int) -> Longs:
    """POOL, what loops read of a pool (native/layout.py); `numbers`: what its view does not tell, by field."""
    numbers |= {"num_slots": view.num_slots, "null_slots": view.null_slots, "page_size": view.page_size}
    numbers |= {"window": view.window or 0, "vocabulary": view.vocab_size or 0, "token_offset": view.token_offset}
    numbers |= {"ahead": view.ahead, "layers": view.num_layers, "words": view.rows.words_per_row}
    numbers |= {"parts": len(view.parts), "seen_slots": seen.ctypes.data}
    if host is not None:
        numbers["formats"] = host.formats.ctypes.data
        arrays = {"addresses": host.address, "layout": host.layout, "starts": host.start_a, "content_a": host.content_a}
        numbers |= {name: array.ctypes.data for name, array in arrays.items()}
        numbers |= {"records": host.records.ctypes.data, "keys": host.layer_keys[0], "start_b": host.start_b}
    return np.frombuffer(filled(POOL, **numbers), np.int64)


def _dense_part(shape: tuple[int, ...], dtype: torch.dtype) -> DensePart:
    value = torch.empty((1, *shape), dtype=dtype, device="meta")
    return DensePart(dtype, tuple(shape), value.stride()[1:], dtype.itemsize, value.nbytes // WORD_BYTES)
