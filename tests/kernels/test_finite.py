"""Finite: NaN and infinities are seen in every format and layout, by slot and layer, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.content.check import mismatched_layers
from kvcanary_kernels.content.finite import finite_check, finite_check_torch
from kvcanary_kernels.record.formats import format_of
from kvcanary_kernels.record.rows import pool_rows
from stored_pool import dense_words

SENTINEL = -77
WIDE = [torch.float64, torch.float32]
HALVES = [torch.float16, torch.bfloat16]
EIGHTHS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
both = pytest.mark.parametrize("check", [finite_check, finite_check_torch], ids=["triton", "torch"])
by_type = pytest.mark.parametrize("dtype", WIDE + HALVES + EIGHTHS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def mismatch_of(check, rows, slots, **kwargs) -> list[list[int]]:
    mismatch = torch.full((slots.numel(), 2), SENTINEL, device=slots.device)
    check(rows, slots, mismatch=mismatch, **kwargs)
    return mismatch.tolist()


def one_row_each(values: torch.Tensor, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """[n, 1, elements of two words]: each value, beside neighbours that are finite, first and last in its row."""
    width = 8 // min(dtype.itemsize, 4) if dtype.itemsize < 8 else 2
    bits = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    rows = torch.full((len(bits), 1, width), 1, dtype=bits.dtype)
    rows[::2, 0, 0], rows[1::2, 0, -1] = bits[::2], bits[1::2]
    return [rows.view(dtype).to(device)]


@both
@by_type
def test_every_special_value_of_a_type_is_seen_and_no_other(check, dtype: torch.dtype, device: str, tensor) -> None:
    """All bytes of 8 bits, all halves in steps, and floats around the largest exponents, as torch itself sees them."""
    if dtype.itemsize == 1:
        bits = torch.arange(256, dtype=torch.uint8).repeat_interleave(2)
    elif dtype.itemsize == 2:
        bits = torch.cat([torch.arange(start, start + 24) for start in (0, 0x7BF0, 0x7C00, 0x7F70, 0x7FE8)])
        bits = torch.cat([bits, bits - 0x8000]).to(torch.int16).repeat_interleave(2)
    else:
        most = torch.tensor(
            [0.0, 1.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.inf, torch.nan], dtype=dtype
        )
        bits = torch.cat([most, -most]).repeat_interleave(2).view(torch.int32 if dtype.itemsize == 4 else torch.int64)
        bits = torch.cat([bits, bits[8:12] + 1])  # NaN of another payload
    values = bits.view(dtype)
    [k] = one_row_each(values, dtype, device)
    is_finite = values.to(torch.float64).isfinite()
    found = mismatch_of(check, pool_rows([k]), tensor(list(range(len(k)))))
    assert [low for low, _ in found] == (~is_finite).to(torch.int64).tolist()
    assert not any(high for _, high in found)


@both
@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_integers_are_always_finite(check, dtype: torch.dtype, device: str, tensor) -> None:
    """Whatever their bits are."""
    words = torch.tensor([[[0x7FFF7FFF, -1]], [[0, -(2**31)]], [[0x7F800000, 1]]], dtype=torch.int32, device=device)
    assert mismatch_of(check, pool_rows([words.view(dtype)]), tensor([0, 1, 2])) == [[0, 0]] * 3


@both
@pytest.mark.parametrize("layout", ["fused", "k_first", "v_first", "separate", "gaps"])
def test_a_layer_is_named_in_every_layout(check, layout: str, pool, tensor) -> None:
    """K of layer 0, V of layer 2, both of layer 1; a slot that nobody asked for says nothing."""
    rows, _ = pool(layout, torch.float16, slots=9)
    for words in (*dense_words(rows, 0), *dense_words(rows, 1)):
        words.fill_(0x3C003C00)
    for slot, tensors, layer, word in (
        (8, dense_words(rows, 0), 0, 0),
        (5, dense_words(rows, 1), 2, 5),
        (3, dense_words(rows, 0), 1, 5),
        (3, dense_words(rows, 1), 1, 0),
    ):
        tensors[layer][slot, word] |= 0x7C00
    dense_words(rows, 0)[0][2, 1] |= 0x7C000000
    assert mismatch_of(check, rows, tensor([8, 0, 5, 3])) == [[1, 0], [0, 0], [4, 0], [2, 0]]


@both
@pytest.mark.parametrize("layout", ["nhd_pages", "hnd", "hnd_fused", "hnd_sides"])
def test_pages_heads_that_lie_apart_and_scales(check, layout: str, make_content, lay_out, device, tensor) -> None:
    """Rows of fp8 with float32 scales: each part goes by its own format, wherever it lies."""
    content = make_content(15, torch.float8_e4m3fn, extras=1)
    for part in (*content.k, *content.v):
        part.view(torch.uint8).bitwise_and_(0x3F)
    for scales in content.extras[0]:
        scales.fill_(3.0e38)
    content.k[1][4].view(torch.uint8)[2, 7] = 0x7F  # the last element of its last head
    content.v[0][9].view(torch.uint8)[0, 0] = 0xFF
    content.extras[0][1][12, 2] = float("-inf")
    k, v, options = lay_out(content, layout, 5)
    found = mismatch_of(check, pool_rows(k, v, **options), tensor(list(range(15))))
    assert {slot: low for slot, (low, _) in enumerate(found) if low} == {4: 2, 9: 1, 12: 2}


@both
def test_latent_rows_and_rows_longer_than_a_block(check, device: str, tensor) -> None:
    """No V; 2058 halves a row, of which the first and the last count."""
    k = torch.ones(3, 1, 2058, dtype=torch.bfloat16, device=device)
    rows = pool_rows([k])
    assert mismatch_of(check, rows, tensor([0, 1, 2])) == [[0, 0]] * 3
    for place in (0, 2057):
        k[1, 0, place] = float("nan")
        assert mismatch_of(check, rows, tensor([0, 1, 2])) == [[0, 0], [1, 0], [0, 0]]
        k[1, 0, place] = 1


@both
def test_layers_beyond_64(check, pool, tensor) -> None:
    """Layers 0, 63, 64 and 66 are bits of two words, as in the content check."""
    rows, _ = pool("fused", torch.float32, layers=67, slots=4)
    for words in (*dense_words(rows, 0), *dense_words(rows, 1)):
        words.fill_(0)
    for layer in (0, 63, 64, 66):
        dense_words(rows, 1)[layer][3, 2] = 0x7F800001
    found = torch.tensor(mismatch_of(check, rows, tensor([1, 3])))
    assert mismatched_layers(found, 67).nonzero().tolist() == [[0, 1], [63, 1], [64, 1], [66, 1]]


@both
def test_padding_and_bad_slots_keep_their_outputs(check, pool, tensor) -> None:
    """Entries at and after the live count, and ids outside the pool."""
    rows, _ = pool(slots=9)
    for words in (*dense_words(rows, 0), *dense_words(rows, 1)):
        words.fill_(-1)
    found = mismatch_of(check, rows, tensor([-1, 4, 9, 6, 5]), num_live=tensor([4]))
    assert found == [[SENTINEL] * 2, [7, 0], [SENTINEL] * 2, [7, 0], [SENTINEL] * 2]
    assert mismatch_of(check, rows, tensor([])) == []


@both
def test_a_bitmap_of_the_wrong_shape_is_refused(check, pool, tensor) -> None:
    """The message shows the shape that it wants and the one that it got."""
    rows, _ = pool(slots=5)
    with pytest.raises(ValueError, match=r"mismatch must be contiguous \[1, 2\] int64, got \[1\]"):
        check(rows, tensor([4]), mismatch=tensor([0]))


def test_a_format_has_as_many_fingerprints_as_a_word_has_elements() -> None:
    """Four of 8 bits, two of 16, one of 32; an element of 64 bits is judged by its upper word."""
    assert format_of(torch.float8_e5m2).lows == 0x01010101
    assert format_of(torch.bfloat16).highs == 0x80008000
    assert format_of(torch.float32).even == format_of(torch.float32).odd == 0x7F800000
    assert (format_of(torch.float64).even, format_of(torch.float64).odd) == (0, 0x7FF00000)


@both
def test_what_was_written_in_a_grant_is_not_asked(check, device: str, pool, tensor) -> None:
    """A record of another generation, whoever wrote it, vouches for nothing; outputs of the others stay as they are."""
    rows, _ = pool("fused", torch.float32, slots=5)
    for words in (*dense_words(rows, 0)[1:], *dense_words(rows, 1)):
        words.fill_(0)
    dense_words(rows, 0)[0].fill_(0x7F800000)
    records = torch.zeros(5, 8, dtype=torch.int64, device=device)
    records[:, 2] = tensor([7 << 32 | 3, 6 << 32 | 7, 7 << 32, 7, -1])
    unasked, infinite = [SENTINEL, SENTINEL], [1, 0]
    found = mismatch_of(check, rows, tensor([0, 1, 2, 3, 4, 9]), records=records, grants=tensor([7, 7, 7, 7, -1, 7]))
    assert found == [unasked, infinite, unasked, infinite, unasked, unasked]
    with pytest.raises(ValueError, match=r"^records and grants must be given together"):
        mismatch_of(check, rows, tensor([0]), grants=tensor([7]))


@pytest.mark.gpu
def test_slots_and_grants_may_lie_in_pinned_memory(pool, tensor) -> None:
    """A kernel reads them there, and nobody copies them first."""
    rows, _ = pool("fused", torch.float32, slots=3)
    for words in (*dense_words(rows, 0)[1:], *dense_words(rows, 1)):
        words.fill_(0)
    dense_words(rows, 0)[0].fill_(0x7F800000)
    reported = torch.tensor([[0, 1, 2], [5, 6, 7]]).pin_memory()
    mismatch = torch.zeros(3, 2, dtype=torch.int64, device="cuda")
    records = torch.zeros(3, 8, dtype=torch.int64, device="cuda")
    records[:, 2] = 6 << 32
    finite_check(rows, reported[0], mismatch=mismatch, records=records, grants=reported[1])
    assert mismatch.tolist() == [[1, 0], [0, 0], [1, 0]]
