"""A pool of known content with its records, the two ways to store into it, and what must be there afterwards."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcanary_kernels.content.attest import attest, attest_torch, kept_rows
from kvcanary_kernels.content.put import put, put_torch
from kvcanary_kernels.content.store import store, store_torch
from kvcanary_kernels.record.layout import Keys, make_keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows

MASK = 2**64 - 1
POISON = -77
UNTOUCHED = -80  # of what a call adds bits to
CONTENT_B, LOW, HIGH = 4, 5, 6
Place = Callable[[Tensor, int], Tensor]
Way = Callable[..., list[int]]


def dense_words(rows: PoolRows, piece: int) -> list[Tensor]:
    """Per layer [num_slots, words] int32 views of K (0) or V (1), of a pool with dense rows."""
    return [view[:, 0, 0] for view in rows.parts[piece]]


class StoredPool:
    """Its records are sealed ones, whose content columns are zero; every other number of the tables is POISON.

    arrange: gives K, V and the options of `pool_rows` for content, in new memory
    """

    def __init__(self, content: Any, arrange: Callable[[Any], tuple]) -> None:
        self.content, self._arrange = content, arrange
        k, v, arranged = arrange(content)
        self.tensors = [k, v, *arranged["extras"]]
        self.rows = pool_rows(k, v, **arranged)
        self.device = k[0].device
        self.keys = make_keys(5, self.rows.num_layers, self.rows.words_per_row, self.device)
        self.records = torch.full((self.rows.num_slots, 8), POISON, device=self.device)
        self.records[:, CONTENT_B : HIGH + 1] = 0
        self.content_a = torch.full((self.rows.num_layers, self.rows.num_slots), POISON, device=self.device)

    @property
    def tables(self) -> dict[str, Any]:
        return {"keys": self.keys, "records": self.records, "content_a": self.content_a}

    def state(self) -> list:
        """Every byte of the pool's tensors, and both tables."""
        return [_bits(self.tensors), self.records.tolist(), self.content_a.tolist()]

    def expect(self, slots: list[int], values: Any, layers: list[int]) -> None:
        """The pool holds `values` at slots in these layers, and every other byte and number is as it was."""
        expected, others = self.content, [slot for slot in range(self.rows.num_slots) if slot not in slots]
        pairs = zip((values.k, values.v, *values.extras), (expected.k, expected.v, *expected.extras), strict=True)
        for given, part in pairs:
            for layer in layers if part else ():
                part[layer][slots] = given[layer]
        k, v, arranged = self._arrange(expected)
        assert _bits([k, v, *arranged["extras"]]) == _bits(self.tensors)
        records, content_a = self.records.tolist(), self.content_a.tolist()
        bitmap = sum(1 << layer for layer in layers)
        for i, slot in enumerate(slots):
            found = [value & MASK for value in records[slot]]
            fingerprint_b = _fingerprint_b(values, i, layers, self.keys) & MASK
            assert found == [POISON & MASK] * 4 + [fingerprint_b, bitmap & MASK, bitmap >> 64, POISON & MASK]
            for layer in range(self.rows.num_layers):
                fingerprint_a = int(self.keys.start_a[layer]) + _keyed_sum(
                    values.row(layer, i), self.keys.fingerprint_a[layer]
                )
                assert content_a[layer][slot] & MASK == (fingerprint_a if layer in layers else POISON) & MASK
        assert all(records[slot] == [POISON] * 4 + [0, 0, 0, POISON] for slot in others)
        assert all(fingerprint[slot] == POISON for fingerprint in content_a for slot in others)


def _bits(tensors: list[list[Tensor]]) -> list:
    return [[tensor.flatten().view(torch.uint8).tolist() for tensor in part] for part in tensors]


def _fingerprint_b(values: Any, entry: int, layers: list[int], keys: Keys) -> int:
    start = keys.start_b if 0 in layers else 0
    return start + sum(_keyed_sum(values.row(layer, entry), keys.fingerprint_b[layer]) for layer in layers)


def _keyed_sum(row: bytes, keys: Tensor) -> int:
    words = struct.unpack(f"<{len(row) // 4}I", row)
    return sum((k & 0xFFFFFFFF) * w for k, w in zip(keys.tolist(), words, strict=True))


def from_projection(part: Tensor, place: int) -> Tensor:
    """The same values [n, heads, dim] as a split of wider rows, as a fused projection gives them."""
    n, width = part.shape[0], part.shape[1:].numel()
    wide = torch.zeros(n, 3 * width + 4, dtype=part.dtype, device=part.device)
    wide[:, place * width : (place + 1) * width] = part.view(n, width)
    return wide[:, place * width : (place + 1) * width].view(n, *part.shape[1:])


def as_given(part: Tensor, place: int) -> Tensor:
    return part


def _given(values: Any, layer: int, place: Place) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """K, V and extras of a layer as an engine has them."""
    v = place(values.v[layer], 2) if values.v else None
    return place(values.k[layer], 1), v, [extra[layer] for extra in values.extras]


def by_put(operation: Callable[..., None]) -> Way:
    """Each layer with its fingerprints and its bit in one go; the way's answer is what the calls report."""

    def put_layers(
        pool: StoredPool, layers: int | list[int], slots: list[int], values: Any, place: Place = from_projection, **live
    ) -> list[int]:
        twice = torch.full((len(slots),), UNTOUCHED, device=pool.device)
        slot_ids = torch.tensor(slots, dtype=torch.int64, device=pool.device)
        for layer in [layers] if isinstance(layers, int) else layers:
            k, v, extras = _given(values, layer, place)
            operation(pool.rows, layer, slot_ids, k, v, extras=extras, twice=twice, **pool.tables, **live)
        return _added(twice)

    return put_layers


def by_store(store: Callable[..., None], attest: Callable[..., None]) -> Way:
    """The bytes of each layer, then fingerprints and bits of all of them; the way's answer is what the calls report."""

    def store_layers(
        pool: StoredPool, layers: int | list[int], slots: list[int], values: Any, place: Place = from_projection, **live
    ) -> list[int]:
        n, num_layers = len(slots), pool.rows.num_layers
        twice = torch.full((n,), UNTOUCHED, device=pool.device)
        finite = pool.rows if live.pop("asks_finite", False) else None
        slot_ids = torch.tensor(slots, dtype=torch.int64, device=pool.device)
        kept = torch.full((num_layers, n, pool.rows.words_per_row), POISON, dtype=torch.int32, device=pool.device)
        times = torch.zeros(num_layers, n, dtype=torch.int64, device=pool.device)
        listed = [layers] if isinstance(layers, int) else layers
        for number, layer in enumerate(listed):
            k, v, extras = _given(values, layer, place)
            is_ready = layer not in listed[:number] and layer % 2 == 0
            options = {"kept": kept, "times": times, "is_ready": is_ready} | live
            store(pool.rows, layer, slot_ids, k, v, extras=extras, **options)
        attest(kept_rows(pool.rows, kept), slot_ids, times=times, twice=twice, finite=finite, **pool.tables, **live)
        assert not times.any()
        return _added(twice)

    return store_layers


def _added(twice: Tensor) -> list[int]:
    """The bits that calls added, POISON where they added none."""
    return [POISON if value == UNTOUCHED else value ^ UNTOUCHED for value in twice.tolist()]


WAYS = {
    "put-triton": by_put(put),
    "put-torch": by_put(put_torch),
    "store-triton": by_store(store, attest),
    "store-torch": by_store(store_torch, attest_torch),
}
