"""Paged attention: every query sees its row's keys, its own ones by order or by tree, and nothing else."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.engine.attention import attention_workspace, paged_attention, paged_attention_torch

KV_HEADS, SLOTS = 2, 512
POISON = 77.0
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
both = pytest.mark.parametrize("attention", [paged_attention, paged_attention_torch], ids=["triton", "torch"])


@dataclass
class World:
    """Rows of ``lens`` keys, the last ``new`` of them the queries' own, on pages in random order of a random pool."""

    device: str
    lens: list[int]
    new: list[int]
    fold: int = 2
    dim: int = 16
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    tree: bool = False
    options: dict = field(default_factory=dict)
    padding: int = 2  # queries of no row

    def __post_init__(self) -> None:
        torch.manual_seed(sum(self.lens) + self.fold)
        shuffle = random.Random(len(self.lens))
        pages = list(range(1, SLOTS // self.page_size))
        shuffle.shuffle(pages)
        self.pages = [[pages.pop() for _ in range(math.ceil(length / self.page_size))] for length in self.lens]
        self.kv = torch.randn(SLOTS, 2, KV_HEADS, self.dim).to(self.dtype).to(self.device)
        self.q = torch.randn(sum(self.new) + self.padding, KV_HEADS * self.fold, self.dim).to(self.dtype)
        self.q = self.q.to(self.device)
        self.mask = self._random_trees(max(self.new), shuffle) if self.tree else None

    def _random_trees(self, nodes: int, shuffle: random.Random) -> Tensor:
        mask = torch.eye(nodes, dtype=torch.bool).repeat(len(self.lens), 1, 1)
        for row in mask:
            for node in range(1, nodes):
                row[node] |= row[shuffle.randrange(node)]
        return mask.to(self.device)

    def slots(self, row: int) -> list[int]:
        size = self.page_size
        return [page * size + at for page in self.pages[row] for at in range(size)][: self.lens[row]]

    def operands(self) -> dict:
        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        starts = [sum(map(len, self.pages[:row])) for row in range(len(self.pages) + 1)]
        return {
            "kv_indptr": tensor(starts),
            "kv_indices": tensor([page for row in self.pages for page in row]),
            "q_indptr": tensor([sum(self.new[:row]) for row in range(len(self.new) + 1)]),
            "kv_lens": tensor(self.lens) if self.page_size > 1 else None,
            "max_kv_len": max(self.lens),
            "max_q_len": max(self.new),
            "scale": self.dim**-0.5,
            "tree_mask": self.mask,
            "page_size": self.page_size,
        } | self.options

    def run(self, attention) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.q, POISON)
        lse = torch.full(self.q.shape[:2], POISON, device=self.device)
        attention(self.q, self.kv[:, 0], self.kv[:, 1], out=out, lse=lse, **self.operands())
        return out, lse

    def sees(self, row: int, query: int, key: int) -> bool:
        if not self.options.get("causal", True):
            return True
        window = self.options.get("window") or 10**9
        own = self.lens[row] - self.new[row]
        if self.mask is None:
            return own + query - window < key <= own + query
        depth = [int(seen.sum()) - 1 for seen in self.mask[row]]
        if key < own:
            return key - own > depth[query] - window
        return bool(self.mask[row, query, key - own]) and depth[key - own] > depth[query] - window

    def expected(self) -> tuple[Tensor, Tensor]:
        """Query by query and head by head, in float64."""
        q, kv = self.q.double().cpu(), self.kv.double().cpu()
        out, lse = torch.full_like(q, POISON), torch.full(q.shape[:2], POISON, dtype=torch.float64)
        place = 0
        for row, new in enumerate(self.new):
            for query in range(new):
                seen = [slot for key, slot in enumerate(self.slots(row)) if self.sees(row, query, key)]
                for head in range(q.shape[1]):
                    k, v = kv[seen, :, head // self.fold].unbind(1)
                    exponents = (k @ q[place, head] * self.dim**-0.5).exp()
                    lse[place, head] = exponents.sum().log()
                    out[place, head] = exponents @ v / exponents.sum() if seen else 0
                place += 1
        return out, lse

    def check(self, attention) -> None:
        tolerance = TOLERANCE[self.dtype]
        for output, expected in zip(self.run(attention), self.expected(), strict=True):
            torch.testing.assert_close(output.double().cpu(), expected, rtol=tolerance, atol=tolerance)


ROWS = [([1, 9, 37], [1, 1, 1]), ([12, 5, 0, 40], [5, 0, 0, 7]), ([20, 20], [20, 3])]


@both
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("lens", "new"), ROWS, ids=["decode", "ragged", "prefill"])
def test_chains(attention, lens, new, page_size, device) -> None:
    """Decodes, chunks and whole prompts; rows without queries, and queries of no row, write nothing."""
    World(device, lens, new, page_size=page_size).check(attention)


@both
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("nodes", [2, 9])
def test_trees(attention, nodes, page_size, device) -> None:
    """A node sees everything before its tree, its ancestors and itself."""
    World(device, [nodes, 30, 17 + nodes], [nodes] * 3, page_size=page_size, tree=True).check(attention)


@both
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [1, 3, 16])
def test_windows(attention, window, tree, device) -> None:
    """The window is counted along a query's own path."""
    World(device, [9, 40], [6, 6], tree=tree, options={"window": window}).check(attention)


@both
def test_keys_that_are_nobody_s_own(attention, device) -> None:
    """Without causality every query sees all of its row; of an empty row, nothing: zeros."""
    World(device, [19, 0, 33], [4, 2, 1], page_size=16, options={"causal": False}).check(attention)


@both
@pytest.mark.parametrize("fold", range(1, 9))
def test_every_group_size(attention, fold, device) -> None:
    """Heads that share a KV head: 1 to 8 of them."""
    World(device, [7, 20], [1, 3], fold=fold).check(attention)


@both
@pytest.mark.parametrize("fold", [3, 7])
def test_tiles_that_end_inside_a_token(attention, fold, device) -> None:
    """The heads of one query may lie in two tiles, and each of them sees the query's own key."""
    World(device, [90], [90], fold=fold).check(attention)


@both
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_head_sizes_of_16_bit_numbers(attention, dim, dtype, device) -> None:
    """Sizes that are powers of two, and one that is not."""
    World(device, [70, 33], [1, 2], fold=4, dim=dim, dtype=dtype).check(attention)


@both
@pytest.mark.parametrize("max_kv_len", [300, 100_000])
def test_split_keys(attention, max_kv_len, device) -> None:
    """A row's keys may be shared by programs, more of them than there are keys; what the scratch held is nothing."""
    world = World(device, [300, 3, 0], [1, 1, 1], options={"max_kv_len": max_kv_len})
    sizes = {"rows": 3, "max_q_len": 1, "max_kv_len": max_kv_len, "device": device}
    workspace = attention_workspace(len(world.q), KV_HEADS * 2, KV_HEADS, 16, **sizes).fill_(torch.nan)
    assert workspace.numel() > 0
    world.options["workspace"] = workspace
    world.check(attention)


@both
@pytest.mark.parametrize("bad", [-1, SLOTS, 2**40, -(2**40)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_no_page_is_the_null_page(attention, page_size, bad, device) -> None:
    """Nothing outside the pool is read; the canary reports the index."""
    world = World(device, [40, 20], [1, 1], page_size=page_size)
    world.pages[0][1] = 0
    expected = world.run(paged_attention_torch)
    world.pages[0][1] = bad
    for output, right in zip(world.run(attention), expected, strict=True):
        torch.testing.assert_close(output, right)


@both
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_fp8_pools(attention, kind, device) -> None:
    """8-bit K and V with a scale each."""
    world = World(device, [70, 9], [1, 3], dtype=torch.float16, dim=32)
    small = (world.kv / torch.tensor([2.0, 0.5], device=device)[:, None, None]).to(torch.float8_e4m3fn)
    world.kv = (small.float() * torch.tensor([2.0, 0.5], device=device)[:, None, None]).half()
    expected = world.expected()[0]
    world.kv = small
    scales = {"k_scale": 2.0, "v_scale": 0.5}
    if kind == "tensor":
        scales = {name: torch.tensor(scale, device=device) for name, scale in scales.items()}
    world.options |= scales
    torch.testing.assert_close(world.run(attention)[0].double().cpu(), expected, rtol=3e-3, atol=3e-3)


@both
@pytest.mark.parametrize("page_size", [1, 16])
def test_fp8_pools_with_a_scale_for_each_slot(attention, page_size, device) -> None:
    """Scales of K and V that lie side by side, as a pool keeps them; those of slots that nobody sees are NaN."""
    new, tree = ([1, 3], True) if page_size == 1 else ([1, 1], False)
    world = World(device, [170, 9], new, dim=32, page_size=page_size, tree=tree)
    scales = 2.0 ** torch.randint(-3, 4, (SLOTS, 2)).float().to(device)
    small = (world.kv * 100).to(torch.float8_e4m3fn)
    world.kv = small.float() * scales[:, :, None, None] / 100
    expected = world.expected()[0]
    seen = torch.tensor(world.slots(0) + world.slots(1), device=device)
    unseen = torch.ones(SLOTS, dtype=torch.bool, device=device).index_fill_(0, seen, False)
    world.kv, scales = small, (scales / 100).masked_fill_(unseen[:, None], torch.nan)
    world.options |= {"k_scale": scales[:, 0], "v_scale": scales[:, 1]}
    torch.testing.assert_close(world.run(attention)[0].double().cpu(), expected, rtol=1e-5, atol=1e-5)


@both
def test_operands_of_any_strides(attention, device) -> None:
    """Queries inside a joint projection, K and V heads first, outputs inside a larger tensor."""
    world = World(device, [30, 8], [3, 1])
    expected, _ = world.run(paged_attention_torch)
    wide = torch.zeros(len(world.q), 7, 16, device=device)
    wide[:, 1:5] = world.q
    k, v = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in world.kv.unbind(1))
    out = torch.full_like(wide, POISON)
    attention(wide[:, 1:5], k, v, out=out[:, 2:6], **world.operands())
    torch.testing.assert_close(out[:, 2:6], expected)
    assert (out[:, :2] == POISON).all()
    assert (out[:, 6:] == POISON).all()


@both
def test_no_rows(attention, device) -> None:
    """Nothing to do is done."""
    world = World(device, [5], [1])
    operands = world.operands() | {"q_indptr": torch.zeros(1, dtype=torch.int64, device=device)}
    out = torch.full_like(world.q, POISON)
    operands["kv_indptr"] = operands["q_indptr"]
    attention(world.q, world.kv[:, 0], world.kv[:, 1], out=out, **operands)
    assert (out == POISON).all()


@both
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page_size": 3}, "page_size must divide the pool's 512 slots, got 3"),
        ({"window": 0}, "window must be positive or None, got 0"),
        (
            {"tree_mask": torch.ones(1, 1, 1, dtype=torch.bool)},
            r"tree_mask must be contiguous \[>= 2, N, N\] bool with N >= 3, got \[1, 1, 1\] torch.bool",
        ),
        (
            {"q_indptr": torch.zeros(3, dtype=torch.int32)},
            r"q_indptr must be contiguous \[3\] int64, got \[3\] torch.int32",
        ),
        ({"out": torch.zeros(3, 4, 8)}, r"out must be \[6, 4, 16\] with dense heads of .*, got \[3, 4, 8\]"),
        ({"v_scale": torch.ones(3)}, r"v_scale must be one float32 number, or one for each of 512 slots, got \[3\]"),
        ({"lse": torch.zeros(3)}, r"lse must be contiguous \[6, 4\] of floats, got \[3\] torch.float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_operands_that_do_not_fit(attention, wrong, message, device) -> None:
    """Each names itself, what it must be and what it is."""
    world = World(device, [30, 8], [3, 1])
    operands = {"out": torch.empty_like(world.q)} | world.operands() | wrong
    with pytest.raises(ValueError, match=message):
        attention(world.q, world.kv[:, 0], world.kv[:, 1], **operands)


def test_a_workspace_that_is_too_small(device) -> None:
    """The kernel says how much it needs."""
    world = World(device, [300, 3], [1, 1], options={"workspace": torch.empty(7, device=device)})
    with pytest.raises(ValueError, match=r"workspace must hold \d+ fp32 numbers, got 7 of torch.float32: make it with"):
        world.run(paged_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["decode", "tree"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_captured_call_replays_at_every_batch_size(page_size, tree) -> None:
    """One graph, fewer live rows and other lengths at each replay: rows at and after the live count write nothing."""
    lens, nodes = [40, 23, 60, 31], 5 if tree else 1
    world = World("cuda", lens, [nodes] * 4, page_size=page_size, dtype=torch.bfloat16, dim=64, tree=tree, padding=0)
    operands = world.operands() | {"max_kv_len": 4096}
    sizes = {"rows": 4, "max_q_len": nodes, "max_kv_len": 4096, "device": "cuda"}
    operands["workspace"] = attention_workspace(len(world.q), KV_HEADS * 2, KV_HEADS, 64, **sizes)
    out = torch.empty_like(world.q)

    def call() -> None:
        paged_attention(world.q, world.kv[:, 0], world.kv[:, 1], out=out, **operands)

    call()  # compiles the kernels before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for live in (4, 2, 1, 0, 3):
        world.lens = [max(nodes, length - live) for length in lens[:live]] + [0] * (4 - live)
        world.new = [nodes] * live + [0] * (4 - live)
        world.pages = [pages[: math.ceil(n / page_size)] for pages, n in zip(world.pages, world.lens, strict=True)]
        now = world.operands()
        for name in ("kv_indptr", "q_indptr", "kv_lens"):
            if now[name] is not None:
                operands[name].copy_(now[name])
        operands["kv_indices"][: len(now["kv_indices"])] = now["kv_indices"]
        out.fill_(POISON)
        allocated = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        torch.testing.assert_close(out.double().cpu(), world.expected()[0], rtol=2e-2, atol=2e-2)
        world.pages = World("cuda", lens, [nodes] * 4, page_size=page_size, padding=0).pages
