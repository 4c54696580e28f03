"""Where kernel tests run: Triton's interpreter on the CPU, or compiled kernels on a CUDA device; and small pools."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcanary_kernels import record
from kvcanary_kernels.rows import PoolRows, pool_rows

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: the cuda variant runs")


@pytest.fixture(params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tensor(device: str) -> Callable[[list[int]], Tensor]:
    """An int64 tensor on the device from plain, possibly unsigned, integers."""
    return lambda values: torch.tensor([record.signed(v) for v in values], dtype=torch.int64, device=device)


def make_pool(
    device: str, layout: str = "fused", dtype: torch.dtype = torch.float32, layers: int = 3, slots: int = 32
) -> tuple[list[Tensor], list[Tensor]]:
    """Per-layer K and V of random bytes, rows of 2 heads of 6 (dim 12 for 1-byte types), in one of five layouts."""
    dim = 12 if dtype.itemsize == 1 else 6
    halves = (2, layers, slots, 2, dim)
    shape = {"fused": (layers, slots, 2, 2, dim), "k_first": halves, "v_first": halves}.get(layout)
    if shape is None:  # separate tensors; "gaps": rows lie inside larger rows
        row = 3 if layout == "gaps" else 2
        tensors = [_random_bytes((slots, row, dim), dtype, i, device)[:, :2] for i in range(2 * layers)]
        return tensors[:layers], tensors[layers:]
    kv = _random_bytes(shape, dtype, 0, device)
    if layout != "fused":
        k, v = (kv[0], kv[1]) if layout == "k_first" else (kv[1], kv[0])
        return list(k), list(v)
    return [kv[i, :, 0] for i in range(layers)], [kv[i, :, 1] for i in range(layers)]


def _random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape).to(device)


@pytest.fixture
def pool(device: str) -> Callable[..., tuple[PoolRows, record.Keys]]:
    """make(layout, dtype, ...) -> rows of a random pool, and keys that fit them."""

    def make(*args, **kwargs) -> tuple[PoolRows, record.Keys]:
        rows = pool_rows(*make_pool(device, *args, **kwargs))
        return rows, record.make_keys(11, rows.num_layers, rows.words_per_row, device)

    return make
