"""Poison: a finite pattern in every word of freed slots, and any word that is no longer it names its layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.content.check import mismatched_layers
from kvcanary_kernels.content.poison import poison_check, poison_check_torch, poison_fill, poison_fill_torch
from kvcanary_kernels.record.rows import PoolRows, pool_rows
from stored_pool import dense_words

MASK = 2**64 - 1
POISON = -77
NAN = 0x7FFF7FFF
LAYOUTS = ["fused", "k_first", "v_first", "separate", "gaps"]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
both_fill = pytest.mark.parametrize("fill", [poison_fill, poison_fill_torch], ids=["triton", "torch"])
both_check = pytest.mark.parametrize("check", [poison_check, poison_check_torch], ids=["triton", "torch"])


def pattern(slot: int, offset: int) -> int:
    """One word of the pattern in plain integers: the upper half of a hash, two bits of each byte cleared."""
    z = (slot << 32 | offset) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z >> 32 & 0x3F3F3F3F


def words_of(rows: PoolRows) -> list[list[list[int]]]:
    """[layers][slots] the K words, then the V words."""
    return [
        [[*a, *b] for a, b in zip(k.tolist(), v.tolist(), strict=True)]
        for k, v in zip(dense_words(rows, 0), dense_words(rows, 1), strict=True)
    ]


def expected(before: list[list[list[int]]], slots: list[int], nan: bool) -> list[list[list[int]]]:
    return [
        [
            [NAN if nan else pattern(slot, layer * len(row) + i) for i in range(len(row))] if slot in slots else row
            for slot, row in enumerate(layer_rows)
        ]
        for layer, layer_rows in enumerate(before)
    ]


def mismatch_of(check, rows: PoolRows, slots: Tensor, **kwargs) -> Tensor:
    mismatch = torch.full((slots.numel(), 2), POISON, device=slots.device)
    check(rows, slots, mismatch=mismatch, **kwargs)
    return mismatch


@both_fill
@pytest.mark.parametrize("nan", [False, True], ids=["finite", "nan"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_poison_fill_writes_these_slots_and_no_other(fill, layout: str, nan: bool, pool, tensor) -> None:
    """Every word of every layer of the given slots, the last one too; not a word of any other."""
    rows, _ = pool(layout, torch.float16, slots=9)
    before = words_of(rows)
    fill(rows, tensor([8, 0, 5]), nan=nan)
    assert words_of(rows) == expected(before, [8, 0, 5], nan)


@both_fill
@pytest.mark.parametrize("n", [0, 1])
def test_poison_fill_takes_few_slots(fill, n: int, pool, tensor) -> None:
    """None and one."""
    rows, _ = pool("separate", torch.uint8, slots=5)
    before = words_of(rows)
    fill(rows, tensor([3][:n]))
    assert words_of(rows) == expected(before, [3][:n], nan=False)


@both_fill
def test_poison_fill_writes_nothing_for_bad_slots(fill, pool, tensor) -> None:
    """Ids outside the pool write nowhere."""
    rows, _ = pool(slots=9)
    before = words_of(rows)
    fill(rows, tensor([-1, 4, 9, 2**40, 5]))
    assert words_of(rows) == expected(before, [4, 5], nan=False)


@both_fill
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_poison_is_small_and_finite_in_every_type(fill, dtype: torch.dtype, pool, tensor) -> None:
    """At most 8 whatever the bytes are read as, so that a masked-out score times it is no NaN."""
    rows, _ = pool("fused", dtype, slots=16)
    fill(rows, tensor(list(range(16))))
    for words in (*dense_words(rows, 0), *dense_words(rows, 1)):
        values = words.contiguous().view(dtype).float()
        assert values.isfinite().all()
        assert float(values.abs().max()) <= 8
    fill(rows, tensor([3]), nan=True)
    assert dense_words(rows, 0)[2][3].contiguous().view(dtype).float().isnan().all()


def test_no_bytes_at_all_make_the_pattern_large() -> None:
    """The largest word that the mask lets through, and each byte on its own, in every type."""
    ones = torch.tensor([0x3F3F3F3F], dtype=torch.int32)
    for dtype in FLOATS:
        assert float(ones.view(dtype).float().max()) < 2
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        values = torch.arange(0x40, dtype=torch.uint8).view(dtype).float()
        assert values.isfinite().all()
        assert float(values.max()) < 2
    halves = torch.tensor([h << 8 | low for h in range(0x40) for low in range(0x40)], dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        assert halves.view(dtype).float().isfinite().all()
        assert float(halves.view(dtype).float().max()) < 2


@both_fill
def test_poison_differs_by_slot_layer_and_word(fill, pool, tensor) -> None:
    """A row copied from another freed slot, layer or half is not this slot's pattern."""
    rows, _ = pool(layers=4, slots=32)
    fill(rows, tensor(list(range(32))))
    every = [tuple(row[half : half + 12]) for layer in words_of(rows) for row in layer for half in (0, 12)]
    assert len(set(every)) == len(every)
    assert all(len(set(row)) == len(row) for row in every)


@both_check
@pytest.mark.parametrize("nan", [False, True], ids=["finite", "nan"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_poison_check_names_the_layers(check, layout: str, nan: bool, pool, tensor) -> None:
    """One flipped bit in K of layer 0, V of 2, both of 1: those bits of those slots; the others are clean."""
    rows, _ = pool(layout, torch.float16, slots=9)
    slots = tensor([8, 0, 5, 3])
    poison_fill_torch(rows, slots, nan=nan)
    assert mismatch_of(check, rows, slots, nan=nan).tolist() == [[0, 0]] * 4
    for slot, tensors, layer, word in (
        (8, dense_words(rows, 0), 0, 0),
        (5, dense_words(rows, 1), 2, 5),
        (3, dense_words(rows, 0), 1, 5),
        (3, dense_words(rows, 1), 1, 0),
    ):
        tensors[layer][slot, word] ^= 1 << 31
    assert mismatch_of(check, rows, slots, nan=nan).tolist() == [[1, 0], [0, 0], [4, 0], [2, 0]]


@both_check
def test_poison_check_names_layers_beyond_64(check, pool, tensor) -> None:
    """Layers 0, 63, 64 and 66 are bits of two words, as in the content check."""
    rows, _ = pool("fused", torch.float16, layers=67, slots=4)
    slots = tensor([1, 3])
    poison_fill_torch(rows, slots)
    for layer in (0, 63, 64, 66):
        dense_words(rows, 1)[layer][3, 2] += 1
    mismatch = mismatch_of(check, rows, slots)
    assert mismatch.tolist() == [[0, 0], [-(2**63) + 1, 0b101]]
    assert mismatched_layers(mismatch, 67).nonzero().tolist() == [[0, 1], [63, 1], [64, 1], [66, 1]]


@both_check
def test_rows_of_other_slots_are_not_poison(check, pool, tensor) -> None:
    """Poison moved to another slot, zeros, and rows that were never poisoned are damage in every layer."""
    rows, _ = pool(slots=9)
    slots = tensor([1, 2, 3])
    poison_fill_torch(rows, slots)
    for words in (*dense_words(rows, 0), *dense_words(rows, 1)):
        words[2] = words[1].clone()
        words[3] = 0
    assert mismatch_of(check, rows, tensor([1, 2, 3, 4])).tolist() == [[0, 0], [7, 0], [7, 0], [7, 0]]
    assert mismatch_of(check, rows, tensor([1]), nan=True).tolist() == [[7, 0]]


@both_check
def test_poison_check_writes_nothing_for_bad_slots(check, pool, tensor) -> None:
    """Ids outside the pool keep their outputs."""
    rows, _ = pool(slots=9)
    poison_fill_torch(rows, tensor([4, 5]))
    mismatch = mismatch_of(check, rows, tensor([-1, 4, 9, 6]))
    assert mismatch.tolist() == [[POISON] * 2, [0, 0], [POISON] * 2, [7, 0]]


@both_check
@pytest.mark.parametrize("n", [0, 1])
def test_poison_check_takes_few_slots(check, n: int, pool, tensor) -> None:
    """None and one."""
    rows, _ = pool(slots=5)
    assert mismatch_of(check, rows, tensor([3][:n])).tolist() == [[7, 0]][:n]


@both_fill
@both_check
def test_poison_of_rows_longer_than_a_block_and_of_unequal_halves(fill, check, device: str, tensor) -> None:
    """K rows of 1027 words and V rows of 5; the first word counts, and the last."""
    k, v = torch.zeros(3, 1027, dtype=torch.int32, device=device), torch.zeros(3, 5, dtype=torch.int32, device=device)
    rows = pool_rows([k], [v])
    before = words_of(rows)
    fill(rows, tensor([1]))
    assert words_of(rows) == expected(before, [1], nan=False)
    assert mismatch_of(check, rows, tensor([1])).tolist() == [[0, 0]]
    for word in (0, 1026):
        k[1, word] ^= 1
        assert mismatch_of(check, rows, tensor([1])).tolist() == [[1, 0]]
        k[1, word] ^= 1


@both_check
def test_poison_check_refuses_a_bitmap_of_the_wrong_shape(check, pool, tensor) -> None:
    """The message shows the shape that it wants and the one that it got."""
    rows, _ = pool(slots=5)
    with pytest.raises(ValueError, match=r"mismatch must be contiguous \[1, 2\] int64, got \[1\]"):
        check(rows, tensor([4]), mismatch=tensor([0]))


@pytest.mark.parametrize(
    "operations", [(poison_fill, poison_check), (poison_fill_torch, poison_check_torch)], ids=["triton", "torch"]
)
@pytest.mark.parametrize("layout", ["nhd_pages", "hnd", "hnd_fused", "hnd_sides"])
def test_poison_covers_every_layout_and_scales(operations, layout: str, make_content, lay_out, tensor) -> None:
    """Pages, heads that lie apart and scales hold the pattern in logical order, and no other slot is touched."""
    fill, check = operations
    content = make_content(15, torch.float8_e4m3fn, extras=1)
    k, v, options = lay_out(content, layout, 5)
    rows = pool_rows(k, v, **options)
    every, slots = tensor(list(range(15))), [14, 0, 6]
    before = rows.gather(every).tolist()
    fill(rows, tensor(slots))
    assert rows.gather(every).tolist() == expected(before, slots, nan=False)
    assert not mismatch_of(check, rows, tensor(slots)).any()
    assert mismatch_of(check, rows, every)[:, 0].bool().tolist() == [slot not in slots for slot in range(15)]
