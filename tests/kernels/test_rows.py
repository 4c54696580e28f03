"""Rows: the fingerprint of a slot is a sum over its bytes in logical order, wherever the layout puts them."""

from __future__ import annotations

import struct

import pytest
import torch

from kvcanary_kernels.content.check import check_content, check_content_torch
from kvcanary_kernels.content.fingerprint import fingerprint, fingerprint_torch
from kvcanary_kernels.record.layout import make_keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows

MASK = 2**64 - 1
POISON = -77
LAYOUTS = ["nhd", "nhd_fused", "nhd_pages", "hnd", "hnd_fused", "hnd_sides"]
both = pytest.mark.parametrize("operation", [fingerprint, fingerprint_torch], ids=["triton", "torch"])
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def keys_of(rows: PoolRows):
    return make_keys(7, rows.num_layers, rows.words_per_row, rows.ptrs.device)


def oracle(content, slots: list[int], keys) -> tuple[list[list[int]], list[int]]:
    """Both fingerprints from bytes, in plain integers."""
    fingerprint_a, fingerprint_b = [], [keys.start_b] * len(slots)
    for layer in range(len(content.k)):
        rows = [content.row(layer, slot) for slot in slots]
        words = [struct.unpack(f"<{len(row) // 4}I", row) for row in rows]
        keys_a, keys_b = (
            [k & 0xFFFFFFFF for k in fingerprint[layer].tolist()]
            for fingerprint in (keys.fingerprint_a, keys.fingerprint_b)
        )
        start = int(keys.start_a[layer])
        fingerprint_a.append([(start + sum(k * w for k, w in zip(keys_a, row, strict=True))) & MASK for row in words])
        sums = [sum(k * w for k, w in zip(keys_b, row, strict=True)) for row in words]
        fingerprint_b = [(b + s) & MASK for b, s in zip(fingerprint_b, sums, strict=True)]
    return fingerprint_a, fingerprint_b


def fingerprints(operation, rows: PoolRows, slots: list[int], keys) -> tuple[list[list[int]], list[int]]:
    device = rows.ptrs.device
    fingerprint_a = torch.full((rows.num_layers, len(slots)), POISON, device=device)
    fingerprint_b = torch.full((len(slots),), POISON, device=device)
    operation(
        rows,
        torch.tensor(slots, dtype=torch.int64, device=device),
        keys,
        fingerprint_a=fingerprint_a,
        fingerprint_b=fingerprint_b,
    )
    return [[v & MASK for v in layer] for layer in fingerprint_a.tolist()], [v & MASK for v in fingerprint_b.tolist()]


def some_slots(num_slots: int, page_size: int) -> list[int]:
    """The ends of the pool, the ends of a page that is not the first, and others, without order."""
    ends = [num_slots - 1, 0, page_size, 2 * page_size - 1, num_slots - page_size]
    return list(dict.fromkeys(slot for slot in [*ends, 1, num_slots // 2 + 1] if 0 <= slot < num_slots))


@both
@every_layout
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_fingerprints_are_those_of_the_content_in_every_layout(
    operation, layout: str, page_size: int, make_content, lay_out
) -> None:
    """Heads and pages at any strides: the sums over the plain bytes, so that the same content has the same
    fingerprints.
    """
    content = make_content(3 * page_size)
    k, v, options = lay_out(content, layout, page_size)
    rows = pool_rows(k, v, **options)
    slots, keys = some_slots(rows.num_slots, page_size), keys_of(rows)
    assert rows.num_slots == 3 * page_size
    assert fingerprints(operation, rows, slots, keys) == oracle(content, slots, keys)


@both
@every_layout
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_fingerprints_cover_scales_and_their_order(
    operation, layout: str, page_size: int, make_content, lay_out
) -> None:
    """Scales of K and of V are bytes of the row behind V: a scale that changed changes the fingerprint."""
    content = make_content(3 * page_size, torch.float8_e4m3fn, extras=2)
    k, v, options = lay_out(content, layout, page_size)
    rows = pool_rows(k, v, **options)
    slots, keys = some_slots(rows.num_slots, page_size), keys_of(rows)
    assert rows.words_per_row == 3 * (2 + 2 + 1 + 1)
    assert fingerprints(operation, rows, slots, keys) == oracle(content, slots, keys)


@both
@pytest.mark.parametrize("layout", ["nhd", "nhd_pages", "hnd"])
@pytest.mark.parametrize("extras", [0, 1])
def test_fingerprints_of_latent_rows(operation, layout: str, extras: int, make_content, lay_out) -> None:
    """One latent row a slot, without V: its bytes alone, with a scale where it has one."""
    content = make_content(8, torch.float16, dim=10, latent=True, extras=extras)
    k, _, options = lay_out(content, layout, 4)
    keys = make_keys(7, 2, 5 + extras, k[0].device)
    for v in (None, []):
        rows = pool_rows(k, v, **options)
        assert fingerprints(operation, rows, [7, 0, 4], keys) == oracle(content, [7, 0, 4], keys)


@both
@pytest.mark.parametrize("layout", ["nhd_fused", "nhd_pages", "hnd", "hnd_fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int8, torch.uint8], ids=str)
def test_fingerprints_of_every_element_size(operation, layout: str, dtype: torch.dtype, make_content, lay_out) -> None:
    """1, 2, 4 and 8 byte elements; words of 8 dims are not all a power of two's strides."""
    content = make_content(12, dtype, dim=12, layers=1)
    k, v, options = lay_out(content, layout, 4)
    rows = pool_rows(k, v, **options)
    keys = keys_of(rows)
    assert fingerprints(operation, rows, [11, 5, 0], keys) == oracle(content, [11, 5, 0], keys)


@both
@pytest.mark.parametrize("layout", ["nhd_pages", "hnd", "hnd_fused"])
@pytest.mark.parametrize(
    ("page_size", "dim"), [(512, 8), pytest.param(64, 512, marks=pytest.mark.slow), (2, 1200)], ids=str
)
def test_fingerprints_of_large_pages_and_rows(
    operation, layout: str, page_size: int, dim: int, make_content, lay_out
) -> None:
    """Pages of 512 slots; rows of more words than a program reads at a time, in whole and in broken heads."""
    content = make_content(2 * page_size, dim=dim)
    k, v, options = lay_out(content, layout, page_size)
    rows = pool_rows(k, v, **options)
    slots, keys = some_slots(rows.num_slots, page_size), keys_of(rows)
    assert fingerprints(operation, rows, slots, keys) == oracle(content, slots, keys)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 64, 512])
def test_fingerprints_of_every_slot(layout: str, page_size: int, make_content, lay_out) -> None:
    """All slots of a pool of two pages, kernel against reference and reference against plain integers."""
    content = make_content(2 * page_size, extras=2, layers=1)
    k, v, options = lay_out(content, layout, page_size)
    rows = pool_rows(k, v, **options)
    slots, keys = list(range(rows.num_slots)), keys_of(rows)
    expected = oracle(content, slots, keys)
    assert fingerprints(fingerprint_torch, rows, slots, keys) == expected
    assert fingerprints(fingerprint, rows, slots, keys) == expected


@pytest.mark.parametrize("operation", [check_content, check_content_torch], ids=["triton", "torch"])
@pytest.mark.parametrize("layout", ["nhd_pages", "hnd", "hnd_fused", "hnd_sides"])
def test_check_content_names_the_layer_of_one_bit_in_any_layout(operation, layout: str, make_content, lay_out) -> None:
    """A bit in one head of K, of V or of a scale is the slot's own, and no neighbour's in its page."""
    k, v, options = lay_out(make_content(12, extras=2), layout, 4)
    rows = pool_rows(k, v, **options)
    keys, slots = keys_of(rows), torch.arange(12, device=k[0].device)
    content_a = torch.empty(2, 12, dtype=torch.int64, device=slots.device)
    fingerprint_torch(rows, slots, keys, fingerprint_a=content_a)
    scale = options["extras"][1][1]
    if options.get("layout") != "HND":
        changed = [k[0][2, 1, 2], v[1][1, 0, 0], scale[0, 3]]
    else:
        changed = [k[0][2, 2, 1], v[1][1, 0, 0], scale[0, :, 3]]
    for part in changed:
        part.view({2: torch.int16, 4: torch.int32}[part.element_size()])[-1] ^= 1 << 6
    mismatch = torch.full((12, 2), POISON, device=slots.device)
    operation(rows, slots, keys, content_a, mismatch=mismatch)
    expected = {9: 1, 4: 2, 3: 2}
    assert mismatch.tolist() == [[expected.get(slot, 0), 0] for slot in range(12)]


@pytest.mark.parametrize(
    ("layout", "page_size", "runs"),
    [("nhd", 4, 1), ("nhd_fused", 4, 1), ("nhd_pages", 4, 1), ("hnd", 1, 1), ("hnd", 4, 3), ("hnd_sides", 4, 3)],
)
def test_dense_rows_are_one_run(layout: str, page_size: int, runs: int, make_content, lay_out) -> None:
    """Kernels read a dense row whole; only heads that lie apart are read apart."""
    k, v, options = lay_out(make_content(8), layout, page_size)
    rows = pool_rows(k, v, **options)
    assert [piece.words // piece.run for piece in rows.pieces] == [runs, runs]


def test_pages_that_follow_each_other_are_plain_slots(device: str) -> None:
    """[layers, pages, page_size, heads, dim] is read as [layers, slots, ...], in one step for all layers."""
    pools = torch.zeros(2, 3, 5, 2, 4, device=device)
    paged = pool_rows(list(pools), list(pools + 1), page_size=5)
    assert [piece.page_size for piece in paged.pieces] == [1, 1]
    latent = pool_rows(list(pools), page_size=5)
    assert latent.fused is not None
    assert latent.fused.shape == (2, 15, 1, 8)


@both
@pytest.mark.parametrize(("k", "v"), [((0, 1, 3), (2, 4, 5)), ((0, 2, 4), (1, 3, 5)), ((0, 2, 4), (1, 5, 3))], ids=str)
def test_layers_of_one_storage_in_any_order(operation, k: tuple, v: tuple, make_content) -> None:
    """One step for all rows only where every layer of K and of V keeps it."""
    content = make_content(4, layers=6)
    pool = torch.stack(content.k)
    content.k, content.v = ([content.k[i] for i in order] for order in (k, v))
    rows = pool_rows([pool[i] for i in k], [pool[i] for i in v])
    assert (rows.fused is not None) == (v == (1, 3, 5))
    assert fingerprints(operation, rows, [3, 0], keys_of(rows)) == oracle(content, [3, 0], keys_of(rows))


def test_pool_rows_refuses_heads_that_are_not_words(device: str) -> None:
    """Six bytes of a head that stands alone would straddle words; beside each other they are fine."""
    pages = torch.zeros(2, 2, 4, 6, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"k\[0\] heads must be whole aligned 32-bit words, got 6 bytes"):
        pool_rows([pages], [pages], layout="HND", page_size=4)
    assert pool_rows([pages.transpose(1, 2).contiguous()], page_size=4).words_per_row == 3


def test_pool_rows_refuses_layouts_that_do_not_fit(device: str) -> None:
    """Unknown names, missing page sizes and shapes that belong to another layout are named with their values."""
    pages = torch.zeros(2, 3, 4, 8, device=device)
    with pytest.raises(ValueError, match="layout must be NHD, or HND with a page_size, got HND with page_size None"):
        pool_rows([pages], [pages], layout="HND")
    with pytest.raises(ValueError, match="got NDH with page_size 4"):
        pool_rows([pages], [pages], layout="NDH", page_size=4)
    with pytest.raises(ValueError, match=r"k must be \[pages, page_size, \.\.\.\] with page_size 4, got \[2, 3"):
        pool_rows([pages], [pages], page_size=4)
    with pytest.raises(ValueError, match=r"extras\[0\] must be \[pages, heads, page_size, \.\.\.\] with page_size 4"):
        pool_rows([pages], [pages], layout="HND", page_size=4, extras=[[pages[:, 0, :, 0]]])
    with pytest.raises(ValueError, match=r"k and v and extras\[0\] differ in slots: 8 and 8 and 4"):
        pool_rows([pages], [pages], layout="HND", page_size=4, extras=[[pages[:1, :, :, 0]]])
    with pytest.raises(ValueError, match=r"k and v must have one tensor a layer, got 1 and 2"):
        pool_rows([pages], [pages, pages])
