"""Put: bytes, lanes and layer bits of one layer's values, in one go, and nothing else."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvcanary_kernels import put as module
from kvcanary_kernels.content import check_content_torch
from kvcanary_kernels.fingerprint import fingerprint_torch
from kvcanary_kernels.finish import finish_torch
from kvcanary_kernels.put import put as put_values
from kvcanary_kernels.put import put_torch
from kvcanary_kernels.record import Keys, layers_bitmap, make_keys
from kvcanary_kernels.rows import PoolRows, pool_rows

MASK = 2**64 - 1
POISON = -77
both = pytest.mark.parametrize("operation", [put_values, put_torch], ids=["triton", "torch"])
CONTENT_B, LOW, HIGH = 4, 5, 6


@dataclass
class Pool:
    """A pool of known content with its records: sealed ones, whose content columns are zero."""

    content: object
    tensors: list[list[Tensor]]  # k, v and extras as the layout has them
    rows: PoolRows
    keys: Keys
    records: Tensor
    content_a: Tensor

    def state(self) -> list:
        """Every byte of the pool's tensors, and both tables."""
        parts = [t.flatten().view(torch.uint8).tolist() for part in self.tensors for t in part]
        return [parts, self.records.tolist(), self.content_a.tolist()]


@pytest.fixture
def make(make_content, lay_out, device: str):
    """make(slots, layout, page_size, ...) -> a pool, all of whose records are sealed."""

    def make(slots: int = 12, layout: str = "nhd_fused", page_size: int = 4, dtype=torch.bfloat16, **options) -> Pool:
        content = make_content(slots, dtype, **options)
        k, v, arranged = lay_out(content, layout, page_size)
        rows = pool_rows(k, v, **arranged)
        records = torch.full((slots, 8), POISON, device=device)
        records[:, CONTENT_B : HIGH + 1] = 0
        content_a = torch.full((rows.num_layers, slots), POISON, device=device)
        keys = make_keys(5, rows.num_layers, rows.words_per_row, device)
        return Pool(content, [k, v, *arranged["extras"]], rows, keys, records, content_a)

    return make


def from_projection(part: Tensor, place: int = 1) -> Tensor:
    """The same values [n, heads, dim] as a split of wider rows, as a fused projection gives them."""
    n, width = part.shape[0], part.shape[1:].numel()
    wide = torch.zeros(n, 3 * width + 4, dtype=part.dtype, device=part.device)
    wide[:, place * width : (place + 1) * width] = part.view(n, width)
    return wide[:, place * width : (place + 1) * width].view(n, *part.shape[1:])


def put(operation, pool: Pool, layer: int, slots: list[int], values, **options) -> list[int]:
    """Store a layer of `values`, content of len(slots) slots; what the call reports."""
    twice = torch.full((len(slots),), POISON, device=pool.records.device)
    operation(
        pool.rows,
        layer,
        torch.tensor(slots, dtype=torch.int64, device=twice.device),
        from_projection(values.k[layer]),
        from_projection(values.v[layer], 2) if values.v else None,
        extras=[extra[layer] for extra in values.extras],
        keys=pool.keys,
        records=pool.records,
        content_a=pool.content_a,
        twice=twice,
        **options,
    )
    return twice.tolist()


def keyed_sum(row: bytes, keys: Tensor) -> int:
    words = struct.unpack(f"<{len(row) // 4}I", row)
    return sum((k & 0xFFFFFFFF) * w for k, w in zip(keys.tolist(), words, strict=True))


def check(pool: Pool, slots: list[int], values, layers: list[int], lay_out, layout: str, page_size: int) -> None:
    """The pool holds `values` at slots in these layers, and every other byte and number is as it was."""
    keys, expected, others = pool.keys, pool.content, [s for s in range(pool.rows.num_slots) if s not in slots]
    pairs = zip((values.k, values.v, *values.extras), (expected.k, expected.v, *expected.extras), strict=True)
    for given, part in pairs:
        for layer in layers if part else ():
            part[layer][slots] = given[layer]
    k, v, arranged = lay_out(expected, layout, page_size)
    bits = [[t.flatten().view(torch.uint8).tolist() for t in part] for part in (k, v, *arranged["extras"])]
    assert bits == [[t.flatten().view(torch.uint8).tolist() for t in part] for part in pool.tensors]
    records, content_a = pool.records.tolist(), pool.content_a.tolist()
    bitmap = sum(1 << layer for layer in layers)
    for i, slot in enumerate(slots):
        lane_b = (keys.start_b if 0 in layers else 0) + sum(keyed_sum(values.row(j, i), keys.lane_b[j]) for j in layers)
        found = [value & MASK for value in records[slot]]
        assert found == [POISON & MASK] * 4 + [lane_b & MASK, bitmap & MASK, bitmap >> 64, POISON & MASK]
        for layer in range(pool.rows.num_layers):
            lane_a = int(keys.start_a[layer]) + keyed_sum(values.row(layer, i), keys.lane_a[layer])
            assert content_a[layer][slot] & MASK == (lane_a if layer in layers else POISON) & MASK
    assert all(records[slot] == [POISON] * 4 + [0, 0, 0, POISON] for slot in others)
    assert all(lane[slot] == POISON for lane in content_a for slot in others)


@both
@pytest.mark.parametrize("layout", ["nhd", "nhd_fused", "nhd_pages", "hnd", "hnd_fused", "hnd_sides"])
@pytest.mark.parametrize("extras", [0, 2])
def test_put_writes_bytes_lanes_and_bits_in_every_layout(
    operation, layout: str, extras: int, make, make_content, lay_out
) -> None:
    """Values at strides of a projection: the pool's bytes, both lanes and the bitmap, and not a byte beside them."""
    pool, slots = make(15, layout, 5, extras=extras), [14, 0, 9, 5, 6]
    values = make_content(5, extras=extras, seed=1)
    for layer in (1, 0):  # any order
        assert put(operation, pool, layer, slots, values) == [POISON] * 5
    check(pool, slots, values, [0, 1], lay_out, layout, 5)


@both
@pytest.mark.parametrize("layers", [[0], [2], [0, 2]])
@pytest.mark.parametrize("n", [0, 1])
def test_put_of_some_layers(operation, n: int, layers: list[int], make, make_content, lay_out) -> None:
    """A layer's store leaves other layers alone; the starting constant of lane b comes with layer 0, once."""
    pool, values = make(layers=3), make_content(n, layers=3, seed=1)
    for layer in layers:
        assert put(operation, pool, layer, [11][:n], values) == [POISON][:n]
    check(pool, [11][:n], values, layers, lay_out, "nhd_fused", 4)


@both
def test_put_of_latent_rows(operation, make, make_content, lay_out) -> None:
    """One latent row with a scale, no V."""
    pool = make(8, "hnd", 4, torch.float16, latent=True, extras=1)
    values = make_content(3, torch.float16, latent=True, extras=1, seed=1)
    for layer in range(2):
        assert put(operation, pool, layer, [7, 0, 4], values) == [POISON] * 3
    check(pool, [7, 0, 4], values, [0, 1], lay_out, "hnd", 4)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_put_of_every_element_size(operation, dtype: torch.dtype, make, make_content, lay_out) -> None:
    """1, 4 and 8 bytes an element (2 elsewhere)."""
    pool, values = make(8, "hnd_fused", 4, dtype, layers=1), make_content(2, dtype, layers=1, seed=1)
    assert put(operation, pool, 0, [7, 1], values) == [POISON] * 2
    check(pool, [7, 1], values, [0], lay_out, "hnd_fused", 4)


@both
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_put_of_rows_longer_than_a_block(operation, layout: str, make, make_content, lay_out) -> None:
    """3 heads of 600 words: two blocks of 1024, the second one not full."""
    pool = make(4, layout, 2, dim=1200, layers=1)
    values = make_content(1, dim=1200, layers=1, seed=1)
    assert put(operation, pool, 0, [3], values) == [POISON]
    check(pool, [3], values, [0], lay_out, layout, 2)


@both
def test_put_sets_the_bits_of_all_128_layers(operation, make, make_content, lay_out) -> None:
    """Bits 63, 64 and 127 in their words."""
    pool, values = make(4, dim=2, layers=128), make_content(1, dim=2, layers=128, seed=1)
    for layer in (62, 63, 64, 127):
        assert put(operation, pool, layer, [2], values) == [POISON]
    check(pool, [2], values, [62, 63, 64, 127], lay_out, "nhd_fused", 4)
    assert put(operation, pool, 63, [2], values) == [1]
    assert put(operation, pool, 127, [2], values) == [1]


@both
def test_put_equals_fingerprint_and_finish(operation, make, make_content) -> None:
    """After all layers the tables are those of the separate operations, and the content check agrees."""
    pool, values = make(12, "hnd", 4), make_content(3, seed=1)
    device = pool.records.device
    slots = torch.tensor([11, 4, 0], device=device)
    records, content_a = pool.records.clone(), pool.content_a.clone()
    for layer in range(2):
        put(operation, pool, layer, slots.tolist(), values)
    lane_a, lane_b = torch.empty(2, 3, dtype=torch.int64, device=device), torch.empty_like(slots)
    fingerprint_torch(pool.rows, slots, pool.keys, lane_a=lane_a, lane_b=lane_b)
    finish_torch(records, content_a, slots, lane_a=lane_a, lane_b=lane_b, layers=layers_bitmap(2, device))
    assert torch.equal(records, pool.records)
    assert torch.equal(content_a, pool.content_a)
    mismatch = torch.full((3, 2), POISON, device=device)
    check_content_torch(pool.rows, slots, pool.keys, pool.content_a, mismatch=mismatch)
    assert mismatch.tolist() == [[0, 0]] * 3


@both
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_is_stored_again_is_reported(operation, layer: int, make, make_content, lay_out) -> None:
    """Its slots alone are reported; bytes and lanes are those of the new values, the start is not doubled."""
    pool, first, second = make(12, "hnd", 4), make_content(2, seed=1), make_content(3, seed=2)
    for either in (0, 1):
        assert put(operation, pool, either, [5, 10], first) == [POISON] * 2
    assert put(operation, pool, layer, [10, 3, 5], second) == [1, POISON, 1]
    assert put(operation, pool, 1 - layer, [10, 3, 5], second) == [1, POISON, 1]
    check(pool, [10, 3, 5], second, [0, 1], lay_out, "hnd", 4)


@both
@pytest.mark.parametrize("stored", [False, True])
def test_entries_that_share_a_slot_are_reported(operation, stored: bool, device, make, make_content, lay_out) -> None:
    """All but the first of them; one after the other, the last one's values stay."""
    pool, values = make(12, "hnd", 4), make_content(6, seed=1)
    if stored:
        assert put(operation, pool, 0, [5], make_content(1, seed=2)) == [POISON]
    twice = put(operation, pool, 0, [5, 3, 5, -1, 3, 5], values, num_live=torch.tensor([6], device=device))
    if device == "cpu":  # on a GPU they race: which one is first, and whose bytes stay, is open
        assert twice == [1 if stored else POISON, POISON, 1, POISON, 1, 1]
        for part in (values.k, values.v):
            part[:] = [t[[5, 4]] for t in part]
        check(pool, [5, 3], values, [0], lay_out, "hnd", 4)
    assert twice.count(1) == 3 + stored


@both
def test_put_writes_nothing_for_padding_and_bad_slots(operation, make, make_content, lay_out, tensor) -> None:
    """Refused slots and padding leave no byte, no lane, no bit and no report."""
    pool, values = make(12, "nhd_pages", 4), make_content(7, seed=1)
    slots = [-1, 3, 12, 2**40, 7, 5, 3]
    assert put(operation, pool, 0, slots, values, num_live=tensor([5])) == [POISON] * 7
    for part in (values.k, values.v):
        part[:] = [t[[1, 4]] for t in part]
    check(pool, [3, 7], values, [0], lay_out, "nhd_pages", 4)


@both
@pytest.mark.parametrize("live", [0, -1])
def test_put_with_nothing_live_writes_nothing(operation, live: int, make, make_content, tensor) -> None:
    """A replay without live rows."""
    pool, values = make(), make_content(2, seed=1)
    before = pool.state()
    assert put(operation, pool, 0, [1, 2], values, num_live=tensor([live])) == [POISON] * 2
    assert pool.state() == before


def test_the_reference_bounds_its_temporaries(make, make_content, lay_out, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are summed in chunks, with the same result."""
    pool, values = make(), make_content(7, seed=1)
    monkeypatch.setattr(module, "TEMPORARY_BYTES", 3 * 8 * 24)
    put(put_torch, pool, 1, [*range(5, 12)], values)
    check(pool, [*range(5, 12)], values, [1], lay_out, "nhd_fused", 4)


@both
def test_put_takes_other_types_of_the_same_size(operation, make, make_content, lay_out) -> None:
    """Bytes are stored as they are: a float16 pool may be given the bits as int16."""
    pool, values = make(), make_content(2, seed=1)
    values.k[0] = values.k[0].view(torch.int16)
    assert put(operation, pool, 0, [4, 9], values) == [POISON] * 2
    values.k[0] = values.k[0].view(torch.bfloat16)
    check(pool, [4, 9], values, [0], lay_out, "nhd_fused", 4)


@both
def test_put_of_one_row_takes_any_stride(operation, make, make_content, lay_out) -> None:
    """The stride of a dimension of one means nothing, and need not be whole words."""
    pool, values = make(), make_content(1, seed=1)
    odd = torch.zeros(99, dtype=torch.bfloat16, device=pool.records.device).as_strided((1, 3, 8), (49, 8, 1))
    values.k[0] = odd.copy_(values.k[0])
    twice = torch.full((1,), POISON, device=odd.device)
    tables = {"keys": pool.keys, "records": pool.records, "content_a": pool.content_a, "twice": twice}
    operation(pool.rows, 0, torch.tensor([4], device=odd.device), odd, values.v[0], **tables)
    check(pool, [4], values, [0], lay_out, "nhd_fused", 4)


@both
def test_put_refuses_what_does_not_fit(operation, make, make_content) -> None:
    """Each refusal shows what was wanted and what came, and nothing has been written."""
    pool, values = make(), make_content(2, seed=1)
    before, slots = pool.state(), torch.tensor([1, 2], device=pool.records.device)
    k, v = values.k[0], values.v[0]
    given = {"keys": pool.keys, "records": pool.records, "content_a": pool.content_a, "twice": slots.clone()}

    def refused(match: str, k: Tensor = k, v: Tensor | None = v, layer: int = 0, **changed) -> None:
        with pytest.raises(ValueError, match=match):
            operation(pool.rows, layer, slots, k, v, **{**given, **changed})

    refused(r"k must be \[2, \.\.\.\] with rows of 48 bytes, 2 an element, got \[2, 3, 8\] torch.float32", k.float())
    refused(r"v must be .* 2 an element, got \[2, 3, 4\] torch.float32", v=v.view(torch.float32))
    refused(r"v must be .*got \[1, 3, 8\]", v=v[:1])
    refused(r"k rows must be dense, got strides", k.transpose(1, 2).contiguous().transpose(1, 2))
    odd = torch.zeros(2, 25, dtype=torch.bfloat16, device=slots.device)[:, :24].view(2, 3, 8)
    refused("k rows must be whole aligned 32-bit words, got 48 bytes at strides of .50. bytes", odd)
    refused(r"the pool's rows have 2 pieces, got 1: k", v=None)
    refused(r"the pool's rows have 2 pieces, got 3: k, v, extras\[0\]", extras=[k])
    refused("layer must be 0 to 1, got 2", layer=2)
    refused("layer must be 0 to 1, got -1", layer=-1)
    refused(r"twice must be contiguous \[2\] int64", twice=slots[:1])
    refused(r"num_live must be contiguous \[1\] int64", num_live=slots)
    refused("records must have a row a slot, got 11 for 12 slots", records=pool.records[:11])
    refused(r"content_a must be \[2, 12\] int64", content_a=pool.content_a[:1])
    refused("keys are for 2 layers of 8 words", keys=make_keys(1, 2, 8))
    assert pool.state() == before


@pytest.mark.slow
@both
@pytest.mark.parametrize("layout", ["nhd", "nhd_fused", "nhd_pages", "hnd", "hnd_fused", "hnd_sides"])
@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.float32), (8, torch.float8_e5m2), (128, torch.bfloat16)])
def test_put_of_every_other_slot(operation, layout: str, page_size: int, dtype, make, make_content, lay_out) -> None:
    """Half of a pool's slots in one launch, in each layout, at some page and element sizes."""
    pool = make(2 * page_size, layout, page_size, dtype, extras=2)
    slots = list(range(2 * page_size))[::-2]
    values = make_content(len(slots), dtype, extras=2, seed=1)
    for layer in range(2):
        assert put(operation, pool, layer, slots, values) == [POISON] * len(slots)
    check(pool, slots, values, [0, 1], lay_out, layout, page_size)
