"""A pool of 8-bit numbers: the formula against a table of all of them, and scales that go wherever their rows go."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_engine.memory.cache.host_rows import HostRows, slots_of
from spec_engine.memory.pools.fp8_pool import Fp8Pool, dequantise, quantise
from spec_engine.memory.pools.split_pool import SplitPool, SplitRow
from spec_engine.step.streams import Streams

CPU = torch.device("cpu")
# Every finite e4m3 number of one sign, ascending; its place here is its bits: exponents from -6 on, three bits of
# mantissa, and the last exponent lacks its last number, which is NaN.
TABLE = [m / 8 * 2**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e, m in product(range(-6, 9), range(8))][:-1]


def nearest(value: float) -> float:
    """The number of the table that lies nearest, the one with even bits where two do."""
    magnitude = min(range(len(TABLE)), key=lambda bits: (abs(TABLE[bits] - abs(value)), bits % 2))
    return -TABLE[magnitude] if value < 0 else TABLE[magnitude]


def make_pool(dtype: torch.dtype = torch.float64, num_pages: int = 5) -> Fp8Pool:
    shape = {"num_layers": 2, "num_pages": num_pages, "page_size": 2, "kv_heads": 2, "head_dim": 4, "token_offset": 0}
    return Fp8Pool("target", dtype=dtype, device=CPU, **shape)


def random_rows(n: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of n tokens whose magnitudes differ by six orders."""
    sizes = 10.0 ** torch.randint(-3, 4, (2, n, 1, 1), dtype=dtype)
    return tuple(sizes * torch.randn(2, n, 2, 4, dtype=dtype))


def filled_pool(dtype: torch.dtype = torch.float64) -> Fp8Pool:
    torch.manual_seed(3)
    pool = make_pool(dtype)
    for layer in range(2):
        pool.store(layer, torch.arange(2, 12), *random_rows(10, dtype))
    return pool


def contents(pool: Fp8Pool, slots: list[int]) -> torch.Tensor:
    """What the pool is read as: [layers, n, 2, kv_heads, head_dim]."""
    return torch.stack([pool.load(layer, torch.tensor(slots, dtype=torch.int64)) for layer in range(2)])


def test_the_largest_magnitude_of_a_row_decides_and_others_go_to_the_nearest():
    """Scale is the largest / 448 in float32, a number is the nearest of e4m3 times its scale, exactly."""
    torch.manual_seed(1)
    rows = random_rows(50)[0]
    values, scales = quantise(rows)
    for row, own, scale in zip(rows, values, scales, strict=True):
        assert float(scale) == float((row.abs().max() / 448).float())
        expected = [nearest(float(x)) for x in (row / scale.double()).float().flatten()]
        assert own.double().flatten().tolist() == expected
        assert dequantise(own, scale, torch.float64).flatten().tolist() == [x * float(scale) for x in expected]


@given(st.lists(st.floats(-1e30, 1e30), min_size=8, max_size=8))
def test_no_number_is_far_from_what_was_stored(numbers):
    """Within half a step of e4m3: 1/16 of the number, or 2^-10 of the scale next to zero; never beyond 448 scales."""
    row = torch.tensor(numbers, dtype=torch.float64).view(2, 4)
    values, scale = quantise(row)
    back = dequantise(values, scale, torch.float64)
    assert (back.abs() <= 448 * scale.double()).all()
    assert ((back - row).abs() <= torch.maximum(row.abs() / 16 * (1 + 1e-6), scale.double() * 2**-10)).all()


def test_rows_of_zeros_and_of_the_least_numbers():
    """A row of zeros has scale 1; one whose scale float32 cannot hold has its least normal one: never 0."""
    rows = torch.tensor([0.0, 1e-300, 1e-40, 1e-38], dtype=torch.float64)[:, None, None].expand(4, 2, 4)
    values, scales = quantise(rows)
    assert scales.tolist() == [1.0, *[torch.finfo(torch.float32).tiny] * 3]
    back = dequantise(values, scales, torch.float64)
    assert (back[:2] == 0).all()
    assert ((back[3] - 1e-38).abs() <= 1e-38 / 16).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_in_sight(number, dtype):
    """The row is NaN when it is read, K and V each for itself, and other rows are as they were."""
    pool = filled_pool(dtype)
    k, v = random_rows(2, dtype)
    before = contents(pool, [2, 3, 4])
    k[1, 0, 2] = number
    pool.store(0, torch.tensor([6, 5]), k, v)
    assert pool.load(0, torch.tensor([5]))[0, 0].isnan().all()
    assert pool.load(0, torch.tensor([5]))[0, 1].isfinite().all()
    assert pool.load(0, torch.tensor([6])).isfinite().all()
    assert torch.equal(contents(pool, [2, 3, 4]), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_read_has_the_type_of_the_model(dtype):
    """Bytes and scales do not depend on it, where it holds what is stored; what is read is rounded to it."""
    k, v = (rows.to(dtype) for rows in random_rows(6))
    pool, exact = make_pool(dtype), make_pool(torch.float64)
    for each in (pool, exact):
        each.store(1, torch.arange(4, 10), k.to(each.dtype), v.to(each.dtype))
    assert torch.equal(pool.scales, exact.scales)
    read, reference = (each.load(1, torch.arange(4, 10)) for each in (pool, exact))
    assert read.dtype is dtype
    torch.testing.assert_close(read, reference.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@given(st.permutations(range(2, 12)), st.permutations(range(2, 12)), st.integers(0, 10))
def test_moved_rows_take_their_scales_along(source, destination, count):
    """Wherever a row goes within the pool it is read as before; others stay."""
    pool = filled_pool()
    before = contents(pool, list(range(12)))
    pool.move(torch.tensor(source[:count], dtype=torch.int64), torch.tensor(destination[:count], dtype=torch.int64))
    expected = before.clone()
    expected[:, destination[:count]] = before[:, source[:count]]
    assert torch.equal(contents(pool, list(range(12))), expected)


@given(st.permutations(range(2, 12)), st.permutations(range(12)), st.permutations(range(2, 12)), st.integers(0, 10))
def test_rows_come_back_from_the_host_with_their_scales(slots, places, back, count):
    """From any slots to any places to any slots."""
    pool = filled_pool()
    host, before = HostRows(pool, 12), contents(pool, slots[:count])
    host.save(torch.tensor(slots[:count], dtype=torch.int64), torch.tensor(places[:count], dtype=torch.int64))
    for part in pool.parts:
        part.zero_()
    host.load(torch.tensor(places[:count], dtype=torch.int64), torch.tensor(back[:count], dtype=torch.int64))
    assert torch.equal(contents(pool, back[:count]), before)


def test_a_split_pool_brings_scales_back():
    """Twelve tokens and room for eight on the device: what comes back from the host is what was stored."""
    kv, streams = make_pool(num_pages=4), Streams(CPU)
    split = SplitPool(8, 4, page_size=2, device=CPU)
    split.serve(kv, streams, None)
    rows, expected = [split.allocate(3), split.allocate(3)], []
    for number, pages in enumerate(rows):
        split.bring("prefill", [SplitRow(f"row {number}", pages, 0)])
        own = split.translate(slots_of(pages, 2))
        for layer in range(2):
            kv.store(layer, own, *random_rows(len(own)))
        expected.append(contents(kv, own.tolist()))
    split.bring("decode", [SplitRow("row 0", rows[0], 6)])
    assert torch.equal(contents(kv, split.translate(slots_of(rows[0], 2)).tolist()), expected[0])
    assert split.num_swapped_in == 2


def test_scales_are_counted_and_protected():
    """A row of 8 elements has 16 bytes of K and V and 8 of scales; the canary has both scales by name."""
    pool = make_pool()
    assert pool.nbytes == 2 * 12 * (16 + 8)
    view = pool.view()
    assert [part.name for part in view.parts] == ["K", "V", "k_scale", "v_scale"]
    assert view.slot_bytes * view.num_slots == pool.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gpu_quantises_to_the_same_bytes(dtype):
    """Bytes, scales and what is read are those of a CPU."""
    torch.manual_seed(2)
    rows = random_rows(500, dtype)[0]
    values, scales = quantise(rows)
    own, own_scales = quantise(rows.cuda())
    assert torch.equal(own.cpu().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(own_scales.cpu(), scales)
    assert torch.equal(dequantise(own, own_scales, dtype).cpu(), dequantise(values, scales, dtype))
