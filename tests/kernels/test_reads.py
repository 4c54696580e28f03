"""Reads: attention adds up the fingerprints of what it reads, bit for bit those of the fingerprints; R9 is what
differs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.content.fingerprint import fingerprint_torch
from kvcanary_kernels.content.reads import ReadKeys, ReadSums, judge_reads, judge_reads_torch, reads_fit
from kvcanary_kernels.engine.attention import paged_attention, paged_attention_torch
from kvcanary_kernels.judge.forward import ForwardPlan, new_planned
from kvcanary_kernels.record.layout import CODE_BITS, make_keys
from kvcanary_kernels.record.rows import pool_rows

KV_HEADS, SLOTS, LAYERS, POISON = 2, 256, 2, -77
E4M3 = torch.float8_e4m3fn
both = pytest.mark.parametrize("attention", [paged_attention, paged_attention_torch], ids=["triton", "torch"])


@dataclass
class World:
    """Rows of ``lens`` keys, the last ``new`` their queries' own, over a pool of two layers, of which one is read."""

    device: str
    lens: list[int]
    new: list[int]
    fold: int = 2
    dim: int = 16
    page_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    tree: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(sum(self.lens) + self.fold)
        pages = list(range(1, SLOTS // self.page_size))
        random.Random(len(self.lens)).shuffle(pages)
        self.pages = [[pages.pop() for _ in range(math.ceil(length / self.page_size))] for length in self.lens]
        if len(self.lens) > 1:  # rows that share a prefix
            shared = min(len(self.pages[0]), len(self.pages[-1])) // 2
            self.pages[-1][:shared] = self.pages[0][:shared]
        kv = torch.randn(LAYERS, SLOTS, 2, KV_HEADS, self.dim).to(self.dtype).to(self.device)
        self.bytes = kv.view(torch.int32)
        scales = torch.rand(LAYERS, SLOTS, 2).add(0.5).to(self.device)
        self.scales = scales if self.dtype is E4M3 else None
        extras = [] if self.scales is None else [list(part) for part in self.scales.unbind(2)]
        self.rows = pool_rows(list(kv[:, :, 0]), list(kv[:, :, 1]), extras=extras)
        self.keys = make_keys(7, LAYERS, self.rows.words_per_row, self.device)
        self.k, self.v = kv[1, :, 0], kv[1, :, 1]

    def tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def slots(self, row: int) -> list[int]:
        size = self.page_size
        return [page * size + at for page in self.pages[row] for at in range(size)][: self.lens[row]]

    def firsts(self) -> list[int]:
        return [sum(map(len, self.pages[:row])) for row in range(len(self.pages) + 1)]

    def run(self, attention, reads: ReadSums | None) -> Tensor:
        """Attention of layer 1."""
        dtype = torch.bfloat16 if self.dtype is E4M3 else self.dtype
        q = torch.randn(sum(self.new), KV_HEADS * self.fold, self.dim).to(dtype).to(self.device)
        out = torch.zeros_like(q)
        mask = torch.ones(len(self.new), max(self.new), max(self.new), dtype=torch.bool, device=self.device).tril()
        scales = {} if self.scales is None else {"k_scale": self.scales[1, :, 0], "v_scale": self.scales[1, :, 1]}
        attention(
            q,
            self.k,
            self.v,
            kv_indptr=self.tensor(self.firsts()),
            kv_indices=self.tensor([page for row in self.pages for page in row]),
            q_indptr=self.tensor([sum(self.new[:row]) for row in range(len(self.new) + 1)]),
            kv_lens=self.tensor(self.lens) if self.page_size > 1 else None,
            max_kv_len=max(self.lens),
            max_q_len=max(self.new),
            scale=self.dim**-0.5,
            tree_mask=mask if self.tree else None,
            page_size=self.page_size,
            out=out,
            reads=reads,
            **scales,
        )
        return out

    def sums(self, attention) -> Tensor:
        """What one more run adds to sums that are not zero."""
        places = self.page_size * self.firsts()[-1]
        sums = torch.full((places + 3,), POISON, dtype=torch.int64, device=self.device)
        self.run(attention, ReadKeys(self.rows, self.keys, KV_HEADS).of(1, sums))
        return sums - POISON

    def expected(self) -> Tensor:
        """Word by word, in plain integers."""
        sums = [0] * (self.page_size * self.firsts()[-1] + 3)
        keys = [key & 2**32 - 1 for key in self.keys.fingerprint_a[1].tolist()]
        for row, first in enumerate(self.firsts()[:-1]):
            for number, slot in enumerate(self.slots(row) if self.new[row] else []):
                words = self.bytes[1, slot].flatten().tolist()
                if self.scales is not None:
                    words += self.scales[1, slot].view(torch.int32).tolist()
                fingerprint = sum(key * (word & 2**32 - 1) for key, word in zip(keys, words, strict=True)) % 2**64
                sums[first * self.page_size + number] = fingerprint - 2**64 if fingerprint >> 63 else fingerprint
        return self.tensor(sums)


ROWS = [([1, 9, 37], [1, 1, 1]), ([12, 5, 0, 40], [5, 0, 0, 7]), ([20, 20], [20, 3])]


@both
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("lens", "new"), ROWS, ids=["decode", "ragged", "prefill"])
def test_every_entry_of_a_row_that_is_read_adds_its_fingerprint_once(attention, lens, new, page_size, device):
    """Rows without queries add nothing, nor do places behind a row's end; rows that share slots add each its own."""
    pages = sum(math.ceil(length / page_size) for length in lens)
    if pages >= SLOTS // page_size:
        lens, new = lens[:2], new[:2]
    world = World(device, lens, new, page_size=page_size)
    assert torch.equal(world.sums(attention), world.expected())


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, E4M3])
@pytest.mark.parametrize("dim", [16, 20, 64])
def test_numbers_of_every_size_and_their_scales(attention, dtype, dim, device):
    """A row's words are those of K, of V and of the scales that are read with them."""
    world = World(device, [3, 21], [1, 1], dtype=dtype, dim=dim)
    assert torch.equal(world.sums(attention), world.expected())


@both
@pytest.mark.parametrize("fold", [1, 3, 8])
def test_groups_of_heads_and_splits_of_keys(attention, fold, device):
    """A KV head is read once for all of its query heads, and a row's keys by several programs."""
    world = World(device, [200, 5], [1, 1], fold=fold)
    assert torch.equal(world.sums(attention), world.expected())


@both
@pytest.mark.parametrize("nodes", [4, 70])
def test_trees_and_many_tiles_of_queries(attention, nodes, device):
    """What a mask hides is read all the same; several tiles of one row's queries count it once."""
    world = World(device, [nodes + 30], [nodes], tree=True)
    assert torch.equal(world.sums(attention), world.expected())


@both
def test_the_output_is_what_it_is_without(attention, device):
    """To the last bit."""
    world = World(device, [1, 9, 37], [1, 1, 1], dtype=torch.float32, dim=32)
    outputs = []
    for reads in (None, ReadKeys(world.rows, world.keys, KV_HEADS).of(1, world.expected())):
        torch.manual_seed(1)
        outputs.append(world.run(attention, reads))
    assert torch.equal(*outputs)


@both
@pytest.mark.parametrize(("part", "layer"), [("k", 0), ("k", 1), ("v", 0), ("v", 1)])
@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_bit_is_r9_where_it_is_read(attention, part, layer, place, device):
    """Of K and of V, the first and the last bit of a row, in each layer; and nothing else is."""
    world, judged = World(device, [4, 9], [1, 1]), Judged(device)
    judged.fingerprint(world)
    slot = world.slots(1)[3]
    world.bytes[layer, slot, "kv".index(part)].view(-1)[place] ^= 1 if place == 0 else -(2**31)
    codes = judged.codes(world, attention)
    assert codes.nonzero().flatten().tolist() == [4 + 3]
    assert codes[7] == CODE_BITS["R9"]
    world.bytes[layer, slot, "kv".index(part)].view(-1)[place] ^= 1 if place == 0 else -(2**31)
    assert not judged.codes(world, attention).any()  # sums begin at zero again


@both
def test_what_is_not_judged(attention, device):
    """Padding rows, rows that write nothing and so read nothing, null slots and ids outside the pool; slot 1 counts."""
    world, judged = World(device, [4, 3, 5, 6], [1, 0, 1, 1]), Judged(device)
    judged.fingerprint(world)
    judged.content_a += 1
    world.pages[0][1:] = [0, SLOTS, 1]
    codes = judged.codes(world, attention, live=3)
    assert codes.nonzero().flatten().tolist() == [0, 3, *range(7, 12)]


class Judged:
    """Content of the pool as it was stored, and codes of a forward that reads both layers."""

    def __init__(self, device: str) -> None:
        self.judge = judge_reads

    def fingerprint(self, world: World) -> None:
        self.content_a = torch.zeros(LAYERS, SLOTS, dtype=torch.int64, device=world.device)
        slots = torch.arange(SLOTS, device=world.device)
        fingerprint_torch(world.rows, slots, world.keys, fingerprint_a=self.content_a)
        self.sums = torch.zeros(world.firsts()[-1], dtype=torch.int64, device=world.device)

    def codes(self, world: World, attention, live: int | None = None) -> Tensor:
        """What is added to codes that other checks have found."""
        keys, codes = ReadKeys(world.rows, world.keys, KV_HEADS), torch.full_like(self.sums, CODE_BITS["R3"])
        for layer in range(LAYERS):
            world.k, world.v = (part[layer] for part in world.bytes.view(world.dtype).unbind(2))
            world.run(attention, keys.of(layer, self.sums))
        rows, firsts = len(world.lens), world.tensor(world.firsts())
        bounds = world.tensor([sum(world.new[:row]) for row in range(rows + 1)])
        entries, some = world.tensor([0] * sum(world.new)), world.tensor([0] * rows)
        plan = ForwardPlan(
            world.tensor([page for row in world.pages for page in row]),
            firsts[:-1],
            firsts[1:],
            bounds,
            entries,
            entries,
            entries,
            None,
            some,
            None,
            some,
            world.tensor([rows if live is None else live]),
        )
        planned = new_planned(plan)
        planned.starts.copy_(plan.row_starts)
        planned.row_lengths.copy_(firsts.diff())
        judge = judge_reads if attention is paged_attention else judge_reads_torch
        operands = {"content_a": self.content_a, "start_a": world.keys.start_a, "codes": codes, "null_slots": 1}
        judge(plan, planned, sums=self.sums, **operands)
        assert not self.sums.any()
        assert (codes & CODE_BITS["R3"]).all()
        return codes - CODE_BITS["R3"]


def test_pools_whose_rows_attention_reads_whole() -> None:
    """K and V alike, 4 bytes an element at most, with a scale of each or none."""
    k = [torch.zeros(8, 2, 4)]
    scale = [torch.zeros(8)]
    assert reads_fit(pool_rows(k, k), 2)
    assert reads_fit(pool_rows(k, k, extras=[scale, scale]), 2)
    assert not reads_fit(pool_rows(k), 2)
    assert not reads_fit(pool_rows(k, k, extras=[scale]), 2)
    assert not reads_fit(pool_rows(k, [torch.zeros(8, 2, 8)]), 2)
    assert not reads_fit(pool_rows(k, k, extras=[[torch.zeros(8, 2)], scale]), 2)
    assert not reads_fit(pool_rows([k[0].double()], [k[0].double()]), 2)
    assert reads_fit(pool_rows([torch.zeros(8, 1, 192)], [torch.zeros(8, 1, 192)]), 1)
    assert not reads_fit(pool_rows([torch.zeros(8, 1, 256)], [torch.zeros(8, 1, 256)]), 1)


def test_reads_that_do_not_fit_the_attention(device):
    """They are refused with their sizes."""
    world = World(device, [3], [1])
    keys = ReadKeys(world.rows, world.keys, KV_HEADS)
    with pytest.raises(ValueError, match=r"sums must be \[>= 3\] int64, got \[2\]"):
        world.run(paged_attention, keys.of(1, torch.zeros(2, dtype=torch.int64, device=device)))
    scaled = World(device, [3], [1], dtype=E4M3)
    reads = ReadKeys(scaled.rows, scaled.keys, KV_HEADS).of(1, torch.zeros(3, dtype=torch.int64, device=device))
    scaled.scales = None
    with pytest.raises(ValueError, match=r"reads cover scales of each slot"):
        scaled.run(paged_attention, reads)
    other = ReadKeys(world.rows, world.keys, 2 * KV_HEADS)
    with pytest.raises(ValueError, match=r"reads must be of a pool of 256 slots with factors \[2, 2, 2, 16, 16\]"):
        world.run(paged_attention, other.of(1, torch.zeros(3, dtype=torch.int64, device=device)))
