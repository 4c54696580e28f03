"""Fingerprints: kernel, torch reference and a plain-integer oracle agree on every bit."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.content import fingerprint as module
from kvcanary_kernels.content.fingerprint import fingerprint, fingerprint_torch
from kvcanary_kernels.record import rows as module_of_rows
from kvcanary_kernels.record.layout import Keys, make_keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows
from stored_pool import dense_words

MASK = 2**64 - 1
POISON = -77
both = pytest.mark.parametrize("operation", [fingerprint, fingerprint_torch], ids=["triton", "torch"])


def row_words(row: Tensor) -> tuple[int, ...]:
    data = bytes(row.contiguous().view(torch.uint8).flatten().tolist())
    return struct.unpack(f"<{len(data) // 4}I", data)


def plain_fingerprint(words: tuple[int, ...], keys: Tensor, start: int) -> int:
    return (start + sum((k & 0xFFFFFFFF) * w for k, w in zip(keys.tolist(), words, strict=True))) & MASK


def oracle(rows: PoolRows, slots: list[int], keys: Keys) -> tuple[list[list[int]], list[int]]:
    fingerprint_a, fingerprint_b = [], [keys.start_b] * len(slots)
    for layer in range(rows.num_layers):
        words = [row_words(dense_words(rows, 0)[layer][s]) + row_words(dense_words(rows, 1)[layer][s]) for s in slots]
        fingerprint_a.append([plain_fingerprint(w, keys.fingerprint_a[layer], int(keys.start_a[layer])) for w in words])
        fingerprint_b = [
            (b + plain_fingerprint(w, keys.fingerprint_b[layer], 0)) & MASK
            for b, w in zip(fingerprint_b, words, strict=True)
        ]
    return fingerprint_a, fingerprint_b


def run(operation, rows: PoolRows, slots: Tensor, keys: Keys, **kwargs) -> tuple[list[list[int]], list[int]]:
    fingerprint_a = torch.full((rows.num_layers, slots.numel()), POISON, device=slots.device)
    fingerprint_b = torch.full((slots.numel(),), POISON, device=slots.device)
    operation(rows, slots, keys, fingerprint_a=fingerprint_a, fingerprint_b=fingerprint_b, **kwargs)
    return [[v & MASK for v in layer] for layer in fingerprint_a.tolist()], [v & MASK for v in fingerprint_b.tolist()]


@both
@pytest.mark.parametrize("layout", ["fused", "k_first", "v_first", "separate", "gaps"])
def test_fingerprint_equals_plain_integers_in_every_layout(operation, layout: str, pool, tensor) -> None:
    """Layers in one storage or apart, K before or after V, rows inside larger rows: the same sums."""
    rows, keys = pool(layout)
    assert (rows.fused is not None) == (layout in ("fused", "k_first"))
    slots = [31, 0, 17, 5, 6]  # last slot, first slot, odd count
    assert run(operation, rows, tensor(slots), keys) == oracle(rows, slots, keys)


@both
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8], ids=str
)
def test_fingerprint_reads_the_bytes_of_every_dtype(operation, dtype: torch.dtype, pool, tensor) -> None:
    """Words are bytes in order, whatever they mean: NaN patterns and negative zeros count."""
    rows, keys = pool("fused", dtype, layers=2)
    assert run(operation, rows, tensor([31, 3]), keys) == oracle(rows, [31, 3], keys)


@both
@pytest.mark.parametrize("n", [0, 1])
def test_fingerprint_takes_few_slots(operation, n: int, pool, tensor) -> None:
    """None and one."""
    rows, keys = pool()
    assert run(operation, rows, tensor([9][:n]), keys) == oracle(rows, [9][:n], keys)


def test_few_long_rows_have_a_program_each(tensor, monkeypatch) -> None:
    """A state's slice has thousands of words: by sixteen of them a program, a device would stand idle."""
    states = torch.randn(2, 9, 1, 4500).to(tensor([0]).device)
    rows, keys = pool_rows(list(states), layout="NHD", page_size=1), make_keys(3, 2, 4500, states.device)
    slots, few = tensor([8, 0, 3]), rows.tiling_of(3)
    assert (few["TILE"], few["CHUNK"], rows.tile) == (1, 512, 16)
    in_wide_parts = run(fingerprint, rows, slots, keys)
    monkeypatch.setattr(module_of_rows, "FEW_ROWS", 5)
    assert rows.tiling_of(3) == rows.tiling
    assert in_wide_parts == run(fingerprint, rows, slots, keys) == run(fingerprint_torch, rows, slots, keys)


@both
def test_fingerprint_of_fingerprint_a_alone(operation, pool, tensor) -> None:
    """Without fingerprint b, fingerprint a is the same, and may be a slice of a larger buffer."""
    rows, keys = pool()
    buffer = torch.full((3, 10), POISON, device=rows.ptrs.device)
    operation(rows, tensor([4, 8]), keys, fingerprint_a=buffer[:, 3:5])
    assert [[v & MASK for v in layer] for layer in buffer[:, 3:5].tolist()] == oracle(rows, [4, 8], keys)[0]
    buffer[:, 3:5] = POISON
    assert (buffer == POISON).all()


@both
def test_fingerprint_writes_nothing_for_bad_slots(operation, pool, tensor) -> None:
    """Ids outside the pool keep their outputs."""
    rows, keys = pool()
    fingerprint_a, fingerprint_b = run(operation, rows, tensor([2, -1, 7, 32, 2**40, 5]), keys)
    expected_a, expected_b = oracle(rows, [2, 7, 5], keys)
    untouched = POISON & MASK
    assert [fingerprint_b[i] for i in (0, 2, 5)] == expected_b
    assert [fingerprint_b[i] for i in (1, 3, 4)] == [untouched] * 3
    assert [[layer[i] for i in (0, 2, 5)] for layer in fingerprint_a] == expected_a
    assert all(layer[i] == untouched for layer in fingerprint_a for i in (1, 3, 4))


@both
@pytest.mark.parametrize("bad", [-1, 32, 2**40])
def test_fingerprint_writes_nothing_for_one_bad_slot(operation, bad: int, pool, tensor) -> None:
    """Below the pool or beyond it: each is enough."""
    rows, keys = pool()
    fingerprint_b = run(operation, rows, tensor([2, bad]), keys)[1]
    assert fingerprint_b == [*oracle(rows, [2], keys)[1], POISON & MASK]


@both
def test_fingerprint_of_values_on_their_way_into_the_pool(operation, pool, tensor) -> None:
    """Stacked values with slots 0 to n - 1 give what the pool's rows give after the store."""
    rows, keys = pool()
    slots = tensor([3, 30])
    stored = pool_rows([k[slots] for k in dense_words(rows, 0)], [v[slots] for v in dense_words(rows, 1)])
    assert run(operation, stored, tensor([0, 1]), keys) == run(operation, rows, slots, keys)


def test_every_flipped_bit_changes_its_layer_alone(pool, tensor) -> None:
    """All 32 bits of words in K and V, first and last: fingerprint a of that layer and fingerprint b change, nothing
    else does.
    """
    rows, keys = pool(layers=2)
    slots = tensor([6])
    fingerprint_a, fingerprint_b = run(fingerprint_torch, rows, slots, keys)
    for row, word in (
        (dense_words(rows, 0)[1], 0),
        (dense_words(rows, 0)[1], 11),
        (dense_words(rows, 1)[1], 0),
        (dense_words(rows, 1)[1], 11),
    ):
        for bit in range(32):
            flip = (1 << bit) - (1 << 32 if bit == 31 else 0)
            row[6, word] ^= flip
            changed_a, changed_b = run(fingerprint_torch, rows, slots, keys)
            row[6, word] ^= flip
            assert changed_a[0] == fingerprint_a[0]
            assert changed_a[1] != fingerprint_a[1]
            assert changed_b != fingerprint_b


@both
def test_two_flipped_top_bits_do_not_cancel(operation, pool, tensor) -> None:
    """The sums are 64 bits wide: the top bits of two words differ by keys, not by 2^31 twice."""
    rows, keys = pool(layers=1)
    before = run(operation, rows, tensor([6]), keys)
    dense_words(rows, 0)[0][6, 2] ^= -(2**31)
    dense_words(rows, 1)[0][6, 3] ^= -(2**31)
    after = run(operation, rows, tensor([6]), keys)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_zeroed_row_has_its_layers_constant(pool, tensor) -> None:
    """Zero bytes do not have a zero fingerprint, and two layers of zeros differ."""
    rows, keys = pool()
    for row in (*dense_words(rows, 0), *dense_words(rows, 1)):
        row.zero_()
    fingerprint_a, fingerprint_b = run(fingerprint, rows, tensor([6]), keys)
    assert len({0, fingerprint_b[0], *(layer[0] for layer in fingerprint_a)}) == 5


@pytest.mark.parametrize("words", [16, 31, 1024, 1026, 6000])
def test_float64_sums_lose_no_bit(words: int, tensor, device: str) -> None:
    """Rows of all ones, the largest sums, at row sizes on both sides of a change of key pieces."""
    ones = torch.full((2, words), -1, dtype=torch.int32, device=device)
    rows = pool_rows([ones], [ones[:, : words // 2]])
    keys = make_keys(1, 1, rows.words_per_row, device)
    assert run(fingerprint_torch, rows, tensor([1]), keys) == oracle(rows, [1], keys)


@pytest.mark.parametrize("words", [31, 256, 300, 512, 530])
def test_fingerprint_of_rows_of_any_length(words: int, tensor, device: str) -> None:
    """Rows that a program reads in one go or in several, whole or with a rest, and more slots than it takes."""
    generator = torch.Generator().manual_seed(words)
    values = torch.randint(-(2**31), 2**31, (40, words), generator=generator, dtype=torch.int32).to(device)
    rows = pool_rows([values], [values[:, words // 3 :]])
    keys = make_keys(1, 1, rows.words_per_row, device)
    slots = [*range(3, 38, 2), 39]
    assert run(fingerprint, rows, tensor(slots), keys) == oracle(rows, slots, keys)


def test_fingerprint_torch_bounds_its_temporaries(pool, tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many slots are taken in chunks, with the same result, refused slots included."""
    rows, keys = pool()
    slots = tensor([*range(20), -1, 99, *range(20, 32)])
    whole = run(fingerprint_torch, rows, slots, keys)
    monkeypatch.setattr(module, "TEMPORARY_BYTES", 7 * 3 * 24 * 8)
    assert run(fingerprint_torch, rows, slots, keys) == whole


@both
def test_fingerprint_refuses_what_does_not_fit(operation, pool, tensor) -> None:
    """Keys of another size and outputs of a wrong shape are refused with numbers."""
    rows, keys = pool()
    with pytest.raises(ValueError, match="keys are for 3 layers of 8 words, rows have 3 layers of 24"):
        run(operation, rows, tensor([1]), make_keys(1, 3, 8))
    with pytest.raises(ValueError, match=r"fingerprint_a must be \[3, 1\] int64"):
        operation(rows, tensor([1]), keys, fingerprint_a=torch.zeros(2, 1, dtype=torch.int64))


def test_pool_rows_refuses_rows_it_would_have_to_copy(device: str) -> None:
    """A row that is not dense, or not whole words, is refused: a copy would hide the pool's bytes."""
    heads_first = torch.zeros(2, 8, 4, device=device).transpose(0, 1)  # [slots, heads, dim], heads far apart
    with pytest.raises(ValueError, match="rows must be dense"):
        pool_rows([heads_first], [heads_first])
    halves = torch.zeros(8, 3, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="whole aligned 32-bit words, got 6 bytes"):
        pool_rows([halves], [halves])
