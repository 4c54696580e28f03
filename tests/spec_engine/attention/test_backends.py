"""Every backend against the dense reference: prefills, decodes, verified trees and draft branches.

In float64 where a backend can; our kernels in float32 by the interpreter; and all of them in bf16 on a CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from spec_engine.attention.backends import BACKENDS, Needs
from spec_engine.core import Batch, ForwardBatch, chain_forward, concat, indptr, within_window
from spec_engine.drafting.drafter import draft_forward
from spec_engine.drafting.layout import branch_positions
from spec_engine.drafting.paging import ancestor_copies, branch_prefix, tail_copies
from spec_engine.drafting.tree import ancestor_mask
from spec_engine.errors import ConfigError
from spec_engine.memory.pools.fp8_pool import Fp8Pool, dequantise, quantise
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.request_table import RequestTable
from spec_engine.memory.sizing import cdiv, draft_alloc_len

HEADS, KV_HEADS = 4, 2
CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
HOSTED = ("torch", "paged", "block-table")
ON_GPU = [name for name in BACKENDS if name != "dense"]
ON_GPU_8_BIT = [name for name in ON_GPU if not BACKENDS[name].needs.own_types]


class Run(NamedTuple):
    """A backend on a device, in a number type and a head size that it can."""

    name: str
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    dim: int = 8


Grid = Sequence[tuple[int, ...]]


def marks_of(run: Run) -> list[pytest.MarkDecorator]:
    package = BACKENDS[run.name].needs.package
    return [pytest.mark.gpu, *([pytest.mark.package(package)] if package else [])] if run.device == "cuda" else []


def runs(
    hosted: Sequence[str],
    trees: Grid = ((),),
    interpreted: Grid = ((),),
    on_gpu: Grid = ((),),
    served: Sequence[str] = ON_GPU,
) -> list:
    """Backends by page size (and by what else is told): on the CPU, there by the interpreter, and ``served`` ones."""
    kinds = [
        ([Run(name) for name in hosted], (1, 4, 16), trees),
        ([Run(name, torch.float32) for name in ("triton", "triton-paged")], (4,), interpreted),
        ([Run(name, torch.bfloat16, "cuda", 64) for name in served], (1, 16, 64), on_gpu),
    ]
    return [
        pytest.param(run, size, *tree, marks=marks_of(run), id="-".join(map(str, (run.name, run.device, size, *tree))))
        for those, sizes, grid in kinds
        for run in those
        for size in sizes
        for tree in grid
        if not tree or size == 1 or tree[0] == 1 or BACKENDS[run.name].supports_tree_pages
    ]


class World:
    """Requests whose pages lie in random order in a pool of random K and V; what nobody has written is NaN."""

    def __init__(self, page_size: int, lens: tuple[int, ...], room: int, run: Run) -> None:
        torch.manual_seed(page_size + sum(lens))
        counts = [cdiv(length + room, page_size) for length in lens]
        self.page_size, self.run = page_size, run
        self.table = RequestTable(len(lens), max(counts) * page_size, page_size, torch.device(run.device))
        pages = (torch.randperm(sum(counts)) + 1).tolist()
        rows = [self.table.acquire() for _ in lens]
        for row, count in zip(rows, counts, strict=True):
            self.table.append_pages(row, 0, [pages.pop() for _ in range(count)])
        self.table.flush()
        requests = tuple(SimpleNamespace(row=row) for row in rows)
        ids = tuple(f"req-{row}" for row in rows)
        numbers = (self.tensor(rows), lens, self.tensor(lens), self.tensor([0] * len(lens)))
        self.batch = Batch(requests, ids, *numbers)
        self.pool = self.new_pool(sum(counts))
        for row, length in zip(rows, lens, strict=True):
            self.pool.kv[:, self.table.table[row, :length]] = self.random(1, length, 2, KV_HEADS)

    def tensor(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.run.device)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.run.dim, dtype=torch.float64).to(self.run.device, self.run.dtype)

    def qkv(self, n: int) -> list[torch.Tensor]:
        return [self.random(n, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def new_pool(self, num_pages: int) -> KVPool:
        shape = {"num_layers": 1, "num_pages": num_pages, "kv_heads": KV_HEADS, "head_dim": self.run.dim}
        kind = {"dtype": self.run.dtype, "device": torch.device(self.run.device)}
        pool = KVPool("draft", page_size=self.page_size, token_offset=1, **kind, **shape)
        pool.kv[:, self.page_size :] = torch.nan
        return pool

    def copy(self) -> KVPool:
        pool = self.new_pool(self.pool.num_slots // self.page_size - 1)
        pool.kv.copy_(self.pool.kv)
        return pool


def attention(name: str, pool: KVPool, forward: ForwardBatch, qkv: list[torch.Tensor]) -> torch.Tensor:
    opened = BACKENDS[name].load()(pool, forward, HEADS, forward.kv_indices, forward.slots, None)
    return opened.attend(0, *qkv)


def expect_close(output: torch.Tensor, expected: torch.Tensor, run: Run) -> None:
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[run.dtype], atol=TOLERANCE[run.dtype])


def expect_equal(world: World, forward: ForwardBatch) -> None:
    qkv = world.qkv(len(forward.slots))
    expected = attention("dense", world.copy(), forward, qkv)
    expect_close(attention(world.run.name, world.copy(), forward, qkv), expected, world.run)


@pytest.mark.parametrize("new_lens", [(1, 1, 1), (4, 4, 4), (1, 7, 3)], ids=str)
@pytest.mark.parametrize("lens", [(0, 5, 16), (31, 32, 33)], ids=str)
@pytest.mark.parametrize(("run", "page_size"), runs(HOSTED))
def test_chains_equal_the_dense_reference(run, page_size, lens, new_lens):
    """Decodes, prefills and extends, with prefixes that end anywhere in a page and none at all."""
    world = World(page_size, lens, room=8, run=run)
    tokens = world.tensor([0] * sum(new_lens))
    expect_equal(world, chain_forward("extend", 0, world.batch, world.table, tokens, new_lens))


@pytest.mark.parametrize("lens", [(3, 17), (16, 1, 38)], ids=str)
@pytest.mark.parametrize(("run", "page_size"), runs(HOSTED))
def test_verified_trees_equal_the_dense_reference(run, page_size, lens):
    """Random trees of nine nodes: every node sees its prefix, its ancestors and itself."""
    num_nodes = 9
    world = World(page_size, lens, room=num_nodes, run=run)
    parents = world.tensor([[-1, *(int(torch.randint(0, n, ())) for n in range(1, num_nodes))] for _ in lens])
    rows = [
        world.table.table[request.row, : s + num_nodes] for request, s in zip(world.batch.requests, lens, strict=True)
    ]
    kv_lens = tuple(length + num_nodes for length in lens)
    nowhere = world.tensor([0] * len(lens) * num_nodes)
    forward = ForwardBatch(
        kind="verify",
        index=0,
        requests=world.batch.ids,
        rows_per_request=1,
        prefix_lens=world.batch.lens_tensor,
        kv_indptr=indptr(kv_lens, nowhere.device),
        kv_indices=concat(rows),
        kv_lens=kv_lens,
        new_lens=(num_nodes,) * len(lens),
        slots=concat([row[-num_nodes:] for row in rows]),
        tokens=nowhere,
        positions=nowhere,
        tree_mask=ancestor_mask(parents, num_nodes),
    )
    expect_equal(world, forward)


class Drafts:
    """The draft forwards of one step over random parents, as a reader of token indices or of pages sees them."""

    def __init__(self, world: World, topk: int, num_steps: int, whole_pages: bool, pool: KVPool | None = None) -> None:
        self.world, self.topk, self.num_steps, self.whole_pages = world, topk, num_steps, whole_pages
        self.pool = world.copy() if pool is None else pool
        batch, table = world.batch, world.table.table
        layout = {"topk": topk, "num_steps": num_steps, "page_size": world.page_size}
        self.slots = table[batch.rows[:, None, None], branch_positions(batch.lens_tensor, **layout)]
        self.path = self.slots[:, :, :0]
        rows = [(table[request.row], length) for request, length in zip(batch.requests, batch.lens, strict=True)]
        if whole_pages:
            self.pool.move(*(slots.flatten() for slots in tail_copies(table, batch.rows, batch.lens_tensor, **layout)))
            self.prefixes = [branch_prefix(row, length, **layout) for row, length in rows]
        else:
            self.prefixes = [row[:length].expand(topk, -1) for row, length in rows]

    def forward(self, step: int, parents: torch.Tensor) -> ForwardBatch:
        if self.whole_pages:
            self.pool.move(*(slots.flatten() for slots in ancestor_copies(self.slots, parents, step)))
            self.path = self.slots[:, :, : step + 1]
        else:
            path = self.path.gather(1, parents[:, :, None].expand(-1, -1, step))
            self.path = torch.cat((path, self.slots[:, :, step : step + 1]), 2)
        return draft_forward(self.world.batch, step, self.prefixes, self.path, torch.zeros_like(parents))


@pytest.mark.parametrize("lens", [(7, 8), (16, 3, 41)], ids=str)
@pytest.mark.parametrize(
    ("run", "page_size", "topk", "num_steps"),
    runs(HOSTED, [(1, 4), (2, 3), (4, 6)], interpreted=[(2, 3)], on_gpu=[(1, 4), (4, 6)]),
)
def test_draft_branches_equal_the_dense_reference(run, page_size, lens, topk, num_steps):
    """Every branch reads its prefix and its own ancestors, whichever branches the selection let it descend from."""
    world = World(page_size, lens, room=draft_alloc_len(page_size, topk, num_steps, 2), run=run)
    whole_pages = BACKENDS[run.name].reads_pages and page_size > 1
    expected, own = (Drafts(world, topk, num_steps, pages) for pages in (False, whole_pages))
    for step in range(num_steps - 1):
        parents = torch.randint(0, topk if step else 1, (len(lens), topk)).to(run.device)
        qkv = world.qkv(parents.numel())
        reference = attention("dense", expected.pool, expected.forward(step, parents), qkv)
        expect_close(attention(run.name, own.pool, own.forward(step, parents), qkv), reference, run)


@pytest.mark.parametrize("window", [1, 5, 20])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_windows_equal_the_dense_reference(name, window):
    """Rows that begin behind position 0, each token within its window."""
    run = Run(name, torch.float32)
    world = World(4, (31, 3), room=8, run=run)
    forward = chain_forward("extend", 0, world.batch, world.table, world.tensor([0] * 7), (4, 3))
    expect_equal(world, within_window(forward, window))


@pytest.mark.parametrize("name", ["torch", "paged", "block-table", "dense"])
def test_the_output_has_the_type_of_the_query(name):
    """16-bit values come back as such, as close to the reference as they can be."""
    world = World(4, (5,), room=4, run=Run(name, torch.bfloat16))
    forward = chain_forward("decode", 0, world.batch, world.table, world.tensor([0]), (1,))
    expect_equal(world, forward)


@pytest.mark.parametrize(
    ("name", "run", "message"),
    [
        ("flashinfer", Run("", torch.bfloat16, dim=64), "needs the package flashinfer, which is not installed"),
        ("triton", Run(""), "computes in float32 or bfloat16 or float16, got float64"),
    ],
    ids=["package", "dtype"],
)
def test_a_backend_that_cannot_run_says_so(name, run, message, monkeypatch):
    """One sentence: what it needs, and which ones run here."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pool = World(4, (5,), room=4, run=run).pool
    with pytest.raises(ConfigError, match=f"attention_backend '{name}' {message}: those that run here are torch, pag"):
        BACKENDS[name].check_pool(pool)


def test_8_bit_pools_are_refused_by_what_knows_no_scales(monkeypatch):
    """The sentence names those that do; our kernels are among them."""
    monkeypatch.setitem(BACKENDS, "flashinfer", replace(BACKENDS["flashinfer"], needs=Needs(own_types=True)))
    pool = Fp8World(4, (5,), room=4, run=Run("", torch.float32)).fp8_copy()
    with pytest.raises(ConfigError) as refusal:
        BACKENDS["flashinfer"].check_pool(pool)
    assert str(refusal.value) == (
        "attention_backend 'flashinfer' knows no scales of single rows, got a pool of float8_e4m3fn: those that run "
        "here are torch, paged, block-table, dense, triton, triton-paged"
    )


def test_kernels_need_a_cuda_device_or_the_interpreter(monkeypatch):
    """On a CPU they run where Triton interprets them, which is for tests."""
    pool = World(4, (5,), room=4, run=Run("", torch.float32)).pool
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    BACKENDS["triton"].check_pool(pool)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError) as refusal:
        BACKENDS["triton-paged"].check_pool(pool)
    assert str(refusal.value) == (
        "attention_backend 'triton-paged' needs a CUDA device, got cpu: those that run here are torch, paged, "
        "block-table, dense"
    )


class Fp8World(World):
    """The same pages; K and V are stored as 8-bit numbers, or rounded to them and stored as they are."""

    def new_pool(self, num_pages: int) -> KVPool:
        return self.fill(super().new_pool(num_pages))

    def copy(self) -> KVPool:
        return self.new_pool(self.num_pages)

    def fp8_copy(self) -> Fp8Pool:
        shape = {"num_layers": 1, "num_pages": self.num_pages, "kv_heads": KV_HEADS, "head_dim": self.run.dim}
        kind = {"dtype": self.run.dtype, "device": torch.device(self.run.device)}
        return self.fill(Fp8Pool("draft", page_size=self.page_size, token_offset=1, **kind, **shape))

    @property
    def num_pages(self) -> int:
        return self.pool.num_slots // self.page_size - 1

    def fill(self, pool: KVPool) -> KVPool:
        """K and V of every slot of a request, by the pool's own store."""
        slots = torch.arange(self.page_size, pool.num_slots)
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn(2, len(slots), KV_HEADS, self.run.dim, generator=generator, dtype=torch.float64)
        k, v = rows.to(self.run.device, self.run.dtype)
        if type(pool) is KVPool:
            k, v = rounded(k), rounded(v)
        pool.store(0, slots.to(self.run.device), k, v)
        return pool


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """What 8-bit numbers make of these rows."""
    return dequantise(*quantise(rows), rows.dtype)


@pytest.mark.parametrize("new_lens", [(1, 1, 1), (1, 7, 3)], ids=str)
@pytest.mark.parametrize(("run", "page_size"), runs((*HOSTED, "dense"), served=ON_GPU_8_BIT))
def test_8_bit_pools_are_read_as_what_their_numbers_stand_for(run, page_size, new_lens):
    """Chains over 8-bit numbers and scales equal the dense reference over K and V that were rounded so."""
    world = Fp8World(page_size, (31, 32, 33), room=8, run=run)
    tokens = world.tensor([0] * sum(new_lens))
    forward = chain_forward("extend", 0, world.batch, world.table, tokens, new_lens)
    q, k, v = world.qkv(len(forward.slots))
    expected = attention("dense", world.copy(), forward, [q, rounded(k), rounded(v)])
    expect_close(attention(run.name, world.fp8_copy(), forward, [q, k, v]), expected, run)


@pytest.mark.parametrize("lens", [(7, 8), (16, 3, 41)], ids=str)
@pytest.mark.parametrize(
    ("run", "page_size", "topk", "num_steps"),
    runs((*HOSTED, "dense"), [(4, 6)], interpreted=[(2, 3)], on_gpu=[(4, 6)], served=ON_GPU_8_BIT),
)
def test_branches_over_8_bit_pools_equal_the_dense_reference(run, page_size, lens, topk, num_steps):
    """Prefix tails and ancestors are copied into the pages of a branch with their scales."""
    world = Fp8World(page_size, lens, room=draft_alloc_len(page_size, topk, num_steps, 2), run=run)
    whole_pages = BACKENDS[run.name].reads_pages and page_size > 1
    expected, own = Drafts(world, topk, num_steps, False), Drafts(world, topk, num_steps, whole_pages, world.fp8_copy())
    for step in range(num_steps - 1):
        parents = torch.randint(0, topk if step else 1, (len(lens), topk)).to(run.device)
        q, k, v = world.qkv(parents.numel())
        reference = attention("dense", expected.pool, expected.forward(step, parents), [q, rounded(k), rounded(v)])
        expect_close(attention(run.name, own.pool, own.forward(step, parents), [q, k, v]), reference, run)
