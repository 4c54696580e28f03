"""Where kernel tests run: Triton's interpreter on the CPU, or compiled kernels on a CUDA device; and small pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.rows import PoolRows, pool_rows
from stored_pool import StoredPool

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


HEADS = 3


@dataclass
class Content:
    """What slots hold, in plain order: per layer K and V (or none) [slots, heads, dim], extras [slots, heads]."""

    k: list[Tensor]
    v: list[Tensor]
    extras: list[list[Tensor]] = field(default_factory=list)

    def row(self, layer: int, slot: int) -> bytes:
        """The protected bytes of one slot in one layer."""
        parts = [part[layer][slot] for part in (self.k, self.v, *self.extras) if part]
        return b"".join(bytes(part.contiguous().view(torch.uint8).flatten().tolist()) for part in parts)


@pytest.fixture
def make_content(device: str) -> Callable[..., Content]:
    """make(slots, dtype) -> random bytes; a latent row has one head and no V; `extras` scales of 4 bytes a head."""

    def make(
        slots: int,
        dtype: torch.dtype = torch.bfloat16,
        layers: int = 2,
        dim: int = 8,
        latent: bool = False,
        extras: int = 0,
        seed: int = 0,
    ) -> Content:
        def parts(first: int, shape: tuple[int, ...], kind: torch.dtype) -> list[Tensor]:
            return [_random_bytes(shape, kind, 1000 * seed + first + i, device) for i in range(layers)]

        shape = (slots, 1 if latent else HEADS, dim)
        v = [] if latent else parts(100, shape, dtype)
        return Content(
            parts(0, shape, dtype), v, [parts(200 + 10 * e, shape[:2], torch.float32) for e in range(extras)]
        )

    return make


def _heads_first(tensors: list[Tensor], page_size: int) -> list[Tensor]:
    """[pages, heads, page_size, ...] of [slots, heads, ...]."""
    return [t.view(-1, page_size, *t.shape[1:]).transpose(1, 2).contiguous() for t in tensors]


def _fused(k: list[Tensor], v: list[Tensor], dim: int) -> tuple[list[Tensor], list[Tensor]]:
    """K and V as views of tensors in which they alternate in a new dimension."""
    pools = [torch.stack(pair, dim) for pair in zip(k, v, strict=True)] if v else k
    return ([kv.select(dim, 0) for kv in pools], [kv.select(dim, 1) for kv in pools]) if v else (k, v)


@pytest.fixture
def lay_out() -> Callable[..., tuple]:
    """lay_out(content, layout, page_size) -> k, v and the options of pool_rows, in new memory.

    nhd:         [slots, heads, dim], separate tensors
    nhd_fused:   [slots, 2, heads, dim]
    nhd_pages:   [pages, 2, page_size, heads, dim]
    hnd:         [pages, heads, page_size, dim]
    hnd_fused:   [pages, 2, heads, page_size, dim], scales as a view of [slots, heads]
    hnd_sides:   [pages, heads, page_size, 2, dim]: K and V of a head side by side
    """

    def arrange(content: Content, layout: str, page_size: int) -> tuple:
        k, v = [t.clone() for t in content.k], [t.clone() for t in content.v]
        extras = [[t.clone() for t in extra] for extra in content.extras]
        if layout.startswith("nhd"):
            if layout == "nhd":
                return k, v, {"extras": extras}
            if layout == "nhd_fused":
                return *_fused(k, v, 1), {"extras": extras}
            k, v, *extras = [[t.view(-1, page_size, *t.shape[1:]) for t in part] for part in (k, v, *extras)]
            return *_fused(k, v, 1), {"page_size": page_size, "extras": extras}
        k, v = _heads_first(k, page_size), _heads_first(v, page_size)
        if layout == "hnd_fused":
            extras = [[t.view(-1, page_size, t.shape[1]).transpose(1, 2) for t in extra] for extra in extras]
        else:
            extras = [_heads_first(extra, page_size) for extra in extras]
        k, v = (k, v) if layout == "hnd" else _fused(k, v, 1 if layout == "hnd_fused" else 3)
        return k, v, {"layout": "HND", "page_size": page_size, "extras": extras}

    return arrange


@pytest.fixture
def make_stored(make_content: Callable[..., Content], lay_out: Callable[..., tuple]) -> Callable[..., StoredPool]:
    """make_stored(slots, layout, page_size, dtype, ...) -> a pool of random bytes, all of whose records are sealed."""

    def make(
        slots: int = 12,
        layout: str = "nhd_fused",
        page_size: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        **content: int,
    ) -> StoredPool:
        return StoredPool(make_content(slots, dtype, **content), partial(lay_out, layout=layout, page_size=page_size))

    return make
