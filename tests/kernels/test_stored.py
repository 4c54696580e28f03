"""What is stored, by put or by store and attest: bytes, fingerprints and layer bits of the layers, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.content import fingerprint
from kvcanary_kernels.content.check import check_content_torch
from kvcanary_kernels.content.fingerprint import fingerprint_torch
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record import rows
from kvcanary_kernels.record.layout import layers_bitmap
from stored_pool import POISON, WAYS, as_given

every_way = pytest.mark.parametrize("store", WAYS.values(), ids=WAYS)


@every_way
@pytest.mark.parametrize("layout", ["nhd", "nhd_fused", "nhd_pages", "hnd", "hnd_fused", "hnd_sides"])
@pytest.mark.parametrize("extras", [0, 2])
def test_bytes_fingerprints_and_bits_in_every_layout(
    store, layout: str, extras: int, make_stored, make_content
) -> None:
    """Values at strides of a projection: the pool's bytes, both fingerprints and the bitmap, and not a byte beside
    them.
    """
    pool, slots = make_stored(15, layout, 5, extras=extras), [14, 0, 9, 5, 6]
    values = make_content(5, extras=extras, seed=1)
    for layer in (1, 0):  # any order
        assert store(pool, layer, slots, values) == [POISON] * 5
    pool.expect(slots, values, [0, 1])


@every_way
@pytest.mark.parametrize("layers", [[0], [2], [0, 2]])
@pytest.mark.parametrize("n", [0, 1])
def test_some_layers(store, n: int, layers: list[int], make_stored, make_content) -> None:
    """A layer's store leaves other layers alone; the starting constant of fingerprint b comes with layer 0, once."""
    pool, values = make_stored(layers=3), make_content(n, layers=3, seed=1)
    for layer in layers:
        assert store(pool, layer, [11][:n], values) == [POISON][:n]
    pool.expect([11][:n], values, layers)


@every_way
def test_latent_rows(store, make_stored, make_content) -> None:
    """One latent row with a scale, no V."""
    pool = make_stored(8, "hnd", 4, torch.float16, latent=True, extras=1)
    values = make_content(3, torch.float16, latent=True, extras=1, seed=1)
    for layer in range(2):
        assert store(pool, layer, [7, 0, 4], values) == [POISON] * 3
    pool.expect([7, 0, 4], values, [0, 1])


@every_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_every_element_size(store, dtype: torch.dtype, make_stored, make_content) -> None:
    """1, 4 and 8 bytes an element (2 elsewhere)."""
    pool, values = make_stored(8, "hnd_fused", 4, dtype, layers=1), make_content(2, dtype, layers=1, seed=1)
    assert store(pool, 0, [7, 1], values) == [POISON] * 2
    pool.expect([7, 1], values, [0])


@every_way
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_rows_longer_than_a_block(store, layout: str, make_stored, make_content) -> None:
    """3 heads of 600 words: two blocks of 1024, the second one not full."""
    pool = make_stored(4, layout, 2, dim=1200, layers=1)
    values = make_content(1, dim=1200, layers=1, seed=1)
    assert store(pool, 0, [3], values) == [POISON]
    pool.expect([3], values, [0])


@every_way
def test_the_bits_of_all_128_layers(store, make_stored, make_content) -> None:
    """Bits 63, 64 and 127 in their words."""
    pool, values = make_stored(4, dim=2, layers=128), make_content(1, dim=2, layers=128, seed=1)
    assert store(pool, [62, 63, 64, 127], [2], values) == [POISON]
    pool.expect([2], values, [62, 63, 64, 127])


@every_way
def test_tables_are_those_of_fingerprint(store, make_stored, make_content) -> None:
    """After all layers the tables hold the fingerprints of the rows and every layer's bit, and the content check
    agrees.
    """
    pool, values = make_stored(12, "hnd", 4), make_content(3, seed=1)
    slots = torch.tensor([11, 4, 0], device=pool.device)
    records, content_a = pool.records.clone(), pool.content_a.clone()
    for layer in range(2):
        store(pool, layer, slots.tolist(), values)
    fingerprint_a, fingerprint_b = torch.empty(2, 3, dtype=torch.int64, device=pool.device), torch.empty_like(slots)
    fingerprint_torch(pool.rows, slots, pool.keys, fingerprint_a=fingerprint_a, fingerprint_b=fingerprint_b)
    content_a[:, slots], records[slots, record.CONTENT_B] = fingerprint_a, fingerprint_b
    records[slots, record.LAYERS_LOW : record.LAYERS_HIGH + 1] = layers_bitmap(2, pool.device)
    assert torch.equal(records, pool.records)
    assert torch.equal(content_a, pool.content_a)
    mismatch = torch.full((3, 2), POISON, device=pool.device)
    check_content_torch(pool.rows, slots, pool.keys, pool.content_a, mismatch=mismatch)
    assert mismatch.tolist() == [[0, 0]] * 3


@every_way
def test_nothing_for_padding_and_bad_slots(store, make_stored, make_content, tensor) -> None:
    """Refused slots and padding leave no byte, no fingerprint, no bit and no report."""
    pool, values = make_stored(12, "nhd_pages", 4), make_content(7, seed=1)
    slots = [-1, 3, 12, 2**40, 7, 5, 3]
    assert store(pool, 0, slots, values, num_live=tensor([5])) == [POISON] * 7
    for part in (values.k, values.v):
        part[:] = [t[[1, 4]] for t in part]
    pool.expect([3, 7], values, [0])


@every_way
@pytest.mark.parametrize("live", [0, -1])
def test_nothing_live_writes_nothing(store, live: int, make_stored, make_content, tensor) -> None:
    """A replay without live rows."""
    pool, values = make_stored(), make_content(2, seed=1)
    before = pool.state()
    assert store(pool, 0, [1, 2], values, num_live=tensor([live])) == [POISON] * 2
    assert pool.state() == before


@pytest.mark.parametrize("way", ["put-torch", "store-torch"])
def test_references_bound_their_temporaries(way: str, make_stored, make_content, monkeypatch) -> None:
    """Many rows are summed in chunks, with the same result."""
    pool, values = make_stored(), make_content(7, seed=1)
    monkeypatch.setattr(fingerprint, "TEMPORARY_BYTES", 3 * 8 * 24)
    WAYS[way](pool, 1, [*range(5, 12)], values)
    pool.expect([*range(5, 12)], values, [1])


@pytest.mark.parametrize("layout", ["nhd_fused", "hnd_sides"])
def test_many_rows_share_programs(layout: str, make_stored, make_content, monkeypatch) -> None:
    """As few have one each: the same fingerprints and bits."""
    monkeypatch.setattr(rows, "FEW_ROWS", 2 * 39 - 1)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:39].tolist()
    pool, values = make_stored(40, layout, 5, extras=1), make_content(39, extras=1, seed=1)
    assert WAYS["store-triton"](pool, [0, 1], slots, values) == [POISON] * 39
    pool.expect(slots, values, [0, 1])


@every_way
def test_other_types_of_the_same_size(store, make_stored, make_content) -> None:
    """Bytes are stored as they are: a float16 pool may be given the bits as int16."""
    pool, values = make_stored(), make_content(2, seed=1)
    values.k[0] = values.k[0].view(torch.int16)
    assert store(pool, 0, [4, 9], values) == [POISON] * 2
    values.k[0] = values.k[0].view(torch.bfloat16)
    pool.expect([4, 9], values, [0])


@every_way
def test_one_row_takes_any_stride(store, make_stored, make_content) -> None:
    """The stride of a dimension of one means nothing, and need not be whole words."""
    pool, values = make_stored(), make_content(1, seed=1)
    odd = torch.zeros(99, dtype=torch.bfloat16, device=pool.device).as_strided((1, 3, 8), (49, 8, 1))
    values.k[0] = odd.copy_(values.k[0])
    assert store(pool, 0, [4], values, place=as_given) == [POISON]
    pool.expect([4], values, [0])


@every_way
def test_values_that_do_not_fit_are_refused(store, make_stored, make_content) -> None:
    """Each refusal shows what was wanted and what came, and nothing has been written."""
    pool, values = make_stored(), make_content(2, seed=1)
    before, k, v = pool.state(), values.k[0], values.v[0]

    def refused(match: str, k: Tensor = k, v: Tensor | None = v, extras: Sequence[Tensor] = (), layer: int = 0) -> None:
        given = SimpleNamespace(k=[k] * 3, v=[] if v is None else [v] * 3, extras=[[extra] * 3 for extra in extras])
        with pytest.raises(ValueError, match=match):
            store(pool, layer, [1, 2], given, place=as_given)

    refused(r"k must be \[2, \.\.\.\] with rows of 48 bytes, 2 an element, got \[2, 3, 8\] torch.float32", k.float())
    refused(r"v must be .* 2 an element, got \[2, 3, 4\] torch.float32", v=v.view(torch.float32))
    refused(r"v must be .*got \[1, 3, 8\]", v=v[:1])
    refused(r"k rows must be dense, got strides", k.transpose(1, 2).contiguous().transpose(1, 2))
    odd = torch.zeros(2, 25, dtype=torch.bfloat16, device=pool.device)[:, :24].view(2, 3, 8)
    refused("k rows must be whole aligned 32-bit words, got 48 bytes at strides of .50. bytes", odd)
    refused(r"the pool's rows have 2 pieces, got 1: k", v=None)
    refused(r"the pool's rows have 2 pieces, got 3: k, v, extras\[0\]", extras=[k])
    refused("layer must be 0 to 1, got 2", layer=2)
    refused("layer must be 0 to 1, got -1", layer=-1)
    assert pool.state() == before


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("layout", ["nhd", "nhd_fused", "nhd_pages", "hnd", "hnd_fused", "hnd_sides"])
@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.float32), (8, torch.float8_e5m2), (128, torch.bfloat16)])
def test_every_other_slot(store, layout: str, page_size: int, dtype, make_stored, make_content) -> None:
    """Half of a pool's slots in one launch, in each layout, at some page and element sizes."""
    pool = make_stored(2 * page_size, layout, page_size, dtype, extras=2)
    slots = list(range(2 * page_size))[::-2]
    values = make_content(len(slots), dtype, extras=2, seed=1)
    for layer in range(2):
        assert store(pool, layer, slots, values) == [POISON] * len(slots)
    pool.expect(slots, values, [0, 1])


@every_way
@pytest.mark.parametrize("layout", ["nhd", "hnd_fused"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2], ids=str)
def test_what_is_not_finite_is_told(store, dtype: torch.dtype, layout: str, make_stored, make_content, tensor) -> None:
    """N1 by entry, of any layer and part, beside W4, in the reading that makes fingerprints; nothing for padding, and
    nothing where nobody asks.
    """
    pool = make_stored(12, layout, 4, dtype, extras=1)
    values = make_content(6, dtype, extras=1, seed=1)
    for part in (values.k, values.v, *values.extras):
        part[:] = [torch.ones_like(t) for t in part]
    values.k[1][1, 2, 7], values.v[0][3, 0, 0], values.extras[0][1][4, 1] = torch.nan, torch.inf, -torch.inf
    values.k[0][5] = torch.nan  # of padding
    slots, live = [9, 3, 5, 7, 0, 1], tensor([5])
    assert store(pool, [0, 1], slots, values, num_live=live, asks_finite=True) == [POISON, 2, POISON, 2, 2, POISON]
    again = store(pool, [0, 1, 0], slots, values, num_live=live, asks_finite=True)
    assert again == [1, 3, 1, 3, 3, POISON]
    assert store(make_stored(12, layout, 4, dtype, extras=1), [0, 1], slots, values) == [POISON] * 6


@every_way
def test_integers_are_always_finite(store, make_stored, make_content) -> None:
    """All bits set, in a type that has no NaN."""
    pool, values = make_stored(8, "nhd", 4, torch.uint8), make_content(2, torch.uint8, seed=1)
    for part in (values.k, values.v):
        part[:] = [torch.full_like(t, 255) for t in part]
    assert store(pool, [0, 1], [3, 1], values, asks_finite=True) == [POISON] * 2
