"""Every backend against the dense reference, in float64: prefills, decodes, verified trees and draft branches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spec_engine.attention.backends import BACKENDS
from spec_engine.core import Batch, ForwardBatch, chain_forward, concat, indptr
from spec_engine.drafting.drafter import draft_forward
from spec_engine.drafting.layout import branch_positions
from spec_engine.drafting.paging import ancestor_copies, branch_prefix, tail_copies
from spec_engine.drafting.tree import ancestor_mask
from spec_engine.memory.pool import KVPool
from spec_engine.memory.request_table import RequestTable
from spec_engine.memory.sizing import cdiv, draft_alloc_len

HEADS, KV_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")
CHAIN_BACKENDS = ["torch", "paged", "block-table"]


class World:
    """Requests whose pages lie in random order in a pool of random K and V; what nobody has written is NaN."""

    def __init__(self, page_size: int, lens: tuple[int, ...], room: int, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(page_size + sum(lens))
        counts = [cdiv(length + room, page_size) for length in lens]
        self.page_size, self.dtype = page_size, dtype
        self.table = RequestTable(len(lens), max(counts) * page_size, page_size, CPU)
        pages = (torch.randperm(sum(counts)) + 1).tolist()
        rows = [self.table.acquire() for _ in lens]
        for row, count in zip(rows, counts, strict=True):
            self.table.append_pages(row, 0, [pages.pop() for _ in range(count)])
        requests = tuple(SimpleNamespace(row=row) for row in rows)
        ids = tuple(f"req-{row}" for row in rows)
        self.batch = Batch(requests, ids, torch.tensor(rows), lens, torch.tensor(lens), torch.zeros(len(lens)))
        self.pool = self.new_pool(sum(counts))
        for row, length in zip(rows, lens, strict=True):
            self.pool.kv[:, self.table.table[row, :length]] = torch.randn(1, length, 2, KV_HEADS, DIM, dtype=dtype)

    def new_pool(self, num_pages: int) -> KVPool:
        shape = {"num_layers": 1, "num_pages": num_pages, "kv_heads": KV_HEADS, "head_dim": DIM}
        pool = KVPool("draft", page_size=self.page_size, token_offset=1, dtype=self.dtype, device=CPU, **shape)
        pool.kv[:, self.page_size :] = torch.nan
        return pool

    def copy(self) -> KVPool:
        pool = self.new_pool(self.pool.num_slots // self.page_size - 1)
        pool.kv.copy_(self.pool.kv)
        return pool


def attention(name: str, pool: KVPool, forward: ForwardBatch, qkv: list[torch.Tensor]) -> torch.Tensor:
    opened = BACKENDS[name].load()(pool, forward, HEADS, forward.kv_indices, forward.slots, None)
    return opened.attend(0, *qkv)


def random_qkv(n: int) -> list[torch.Tensor]:
    return [torch.randn(n, heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def expect_equal(name: str, world: World, forward: ForwardBatch) -> None:
    qkv = random_qkv(len(forward.slots))
    expected = attention("dense", world.copy(), forward, qkv)
    torch.testing.assert_close(attention(name, world.copy(), forward, qkv), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("new_lens", [(1, 1, 1), (4, 4, 4), (1, 7, 3)], ids=str)
@pytest.mark.parametrize("lens", [(0, 5, 16), (31, 32, 33)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", CHAIN_BACKENDS)
def test_chains_equal_the_dense_reference(name, page_size, lens, new_lens):
    """Decodes, prefills and extends, with prefixes that end anywhere in a page and none at all."""
    world = World(page_size, lens, room=8)
    tokens = torch.zeros(sum(new_lens), dtype=torch.int64)
    expect_equal(name, world, chain_forward("extend", 0, world.batch, world.table, tokens, new_lens))


@pytest.mark.parametrize("lens", [(3, 17), (16, 1, 38)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", CHAIN_BACKENDS)
def test_verified_trees_equal_the_dense_reference(name, page_size, lens):
    """Random trees of nine nodes: every node sees its prefix, its ancestors and itself."""
    num_nodes = 9
    world = World(page_size, lens, room=num_nodes)
    parents = torch.tensor([[-1, *(int(torch.randint(0, n, ())) for n in range(1, num_nodes))] for _ in lens])
    rows = [
        world.table.table[request.row, : s + num_nodes] for request, s in zip(world.batch.requests, lens, strict=True)
    ]
    kv_lens = tuple(length + num_nodes for length in lens)
    nowhere = torch.zeros(len(lens) * num_nodes, dtype=torch.int64)
    forward = ForwardBatch(
        kind="verify",
        index=0,
        requests=world.batch.ids,
        rows_per_request=1,
        prefix_lens=world.batch.lens_tensor,
        kv_indptr=indptr(kv_lens, CPU),
        kv_indices=concat(rows),
        kv_lens=kv_lens,
        new_lens=(num_nodes,) * len(lens),
        slots=concat([row[-num_nodes:] for row in rows]),
        tokens=nowhere,
        positions=nowhere,
        tree_mask=ancestor_mask(parents, num_nodes),
    )
    expect_equal(name, world, forward)


class Drafts:
    """The draft forwards of one step over random parents, as a reader of token indices or of pages sees them."""

    def __init__(self, world: World, topk: int, num_steps: int, whole_pages: bool) -> None:
        self.world, self.topk, self.num_steps, self.whole_pages = world, topk, num_steps, whole_pages
        self.pool = world.copy()
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


GRID = [(1, 4), (2, 3), (4, 6)]


@pytest.mark.parametrize("lens", [(7, 8), (16, 3, 41)], ids=str)
@pytest.mark.parametrize(
    ("name", "page_size", "topk", "num_steps"),
    [
        *((name, page_size, *tree) for name in ("torch", "paged") for page_size in (1, 4, 16) for tree in GRID),
        *(("block-table", 1, *tree) for tree in GRID),
        *(("block-table", page_size, 1, 4) for page_size in (4, 16)),
    ],
)
def test_draft_branches_equal_the_dense_reference(name, page_size, lens, topk, num_steps):
    """Every branch reads its prefix and its own ancestors, whichever branches the selection let it descend from."""
    world = World(page_size, lens, room=draft_alloc_len(page_size, topk, num_steps, 2))
    whole_pages = BACKENDS[name].reads_pages and page_size > 1
    expected, own = (Drafts(world, topk, num_steps, pages) for pages in (False, whole_pages))
    for step in range(num_steps - 1):
        parents = torch.randint(0, topk if step else 1, (len(lens), topk))
        qkv = random_qkv(parents.numel())
        reference = attention("dense", expected.pool, expected.forward(step, parents), qkv)
        output = attention(name, own.pool, own.forward(step, parents), qkv)
        torch.testing.assert_close(output, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_output_has_the_type_of_the_query(name):
    """16-bit values come back as such, as close to the reference as they can be."""
    world = World(4, (5,), room=4, dtype=torch.bfloat16)
    forward = chain_forward("decode", 0, world.batch, world.table, torch.zeros(1, dtype=torch.int64), (1,))
    qkv = [values.bfloat16() for values in random_qkv(1)]
    expected, output = (attention(each, world.copy(), forward, qkv) for each in ("dense", name))
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
