"""A captured step: one graph, replayed with fewer live rows than it was captured with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.content.attest import attest, kept_rows
from kvcanary_kernels.content.check import check_content
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.content.put import put
from kvcanary_kernels.content.store import store
from kvcanary_kernels.judge.move import move
from kvcanary_kernels.judge.verify import verify
from kvcanary_kernels.record.chain import chain_scan, chain_tree
from kvcanary_kernels.record.layout import layers_bitmap, make_keys
from kvcanary_kernels.record.rows import pool_rows
from kvcanary_kernels.record.seal import seal

POISON = -77
LAYERS, NUM_SLOTS, PAGE_SIZE, ROWS = 3, 64, 4, 9


class Step:
    """All kernels over static buffers, as a captured forward would call them: row r writes and reads slot 63 - r."""

    def __init__(self) -> None:
        def tensor(values: list[int] | range) -> Tensor:
            return torch.tensor(list(values), device="cuda")

        self.kv = torch.randn(LAYERS, NUM_SLOTS, 2, 2, 8, device="cuda")
        self.k, self.v = torch.randn(2, ROWS, 2, 8, device="cuda")
        self.rows = pool_rows([kv[:, 0] for kv in self.kv], [kv[:, 1] for kv in self.kv])
        self.keys = make_keys(4, LAYERS, self.rows.words_per_row, "cuda")
        self.live = tensor([ROWS])
        self.slots, self.moved = tensor(range(63, 63 - ROWS, -1)), tensor(range(8, 8 + ROWS))
        self.tokens, self.positions = tensor(range(100, 100 + ROWS)), tensor([0] * ROWS)
        self.indptr, self.starts, self.ones = tensor(range(ROWS + 1)), tensor(range(ROWS)), tensor([1] * ROWS)
        self.parents, self.seeds, self.one = tensor([-1] * ROWS), tensor(range(ROWS)), tensor([1])
        self.generations, self.layers = tensor([1] * (NUM_SLOTS // PAGE_SIZE)), layers_bitmap(LAYERS, "cuda")
        self.scan, self.tree, self.fingerprint_b, self.codes = (torch.empty_like(self.slots) for _ in range(4))
        self.twice, self.into, self.arrived = (torch.zeros_like(self.slots) for _ in range(3))
        self.nowhere = tensor([-1])
        self.fingerprint_a = torch.empty(LAYERS, ROWS, dtype=torch.int64, device="cuda")
        self.mismatch = torch.empty(ROWS, 2, dtype=torch.int64, device="cuda")
        self.scratch = torch.empty(ROWS, 8 + LAYERS, dtype=torch.int64, device="cuda")
        self.records = torch.empty(NUM_SLOTS, 8, dtype=torch.int64, device="cuda")
        self.content_a = torch.empty(LAYERS, NUM_SLOTS, dtype=torch.int64, device="cuda")
        self.outputs = [self.scan, self.tree, self.fingerprint_a, self.fingerprint_b, self.records, self.content_a]
        self.outputs += [self.codes, self.mismatch]

    def __call__(self) -> None:
        live, keys = {"num_live": self.live}, self.keys
        sites = {"generations": self.one, "step": self.one, "sites": self.one, "pool_id": 0, "keys": keys}
        operands = self.tokens, self.positions
        chain_scan(*operands, self.indptr, self.seeds, keys=keys, out=self.scan, **live)
        chain_tree(*operands, self.parents, self.seeds, max_depth=2, keys=keys, out=self.tree, **live)
        written = {"tokens": self.tokens, "positions": self.positions, "chains": self.scan, "requests": self.one}
        seal(self.records, self.slots, **written, **sites, **live)
        fingerprints = {"fingerprint_a": self.fingerprint_a, "fingerprint_b": self.fingerprint_b}
        fingerprint(self.rows, self.slots, keys, **fingerprints)
        stored = {"records": self.records, "content_a": self.content_a, "twice": self.twice}
        for layer in range(LAYERS):
            put(self.rows, layer, self.slots, self.k, self.v, keys=keys, **stored, **live)
        check_content(self.rows, self.slots, keys, self.content_a, mismatch=self.mismatch, **live)
        torch.where(self.starts < self.live, self.moved, self.nowhere, out=self.into)
        granted = {"page_generations": self.generations, "page_size": PAGE_SIZE, "arrived": self.arrived}
        own = {"requests": self.one, "scratch": self.scratch}
        move(self.records, self.content_a, self.slots, self.into, **sites, **own, **granted)
        verify(
            self.records,
            self.moved,
            starts=self.starts,
            lengths=self.ones,
            first_positions=self.positions,
            predecessors=self.parents,
            seeds=self.seeds,
            generations=self.generations,
            layers=self.layers,
            page_size=PAGE_SIZE,
            null_slots=PAGE_SIZE,
            pool_id=0,
            keys=keys,
            codes=self.codes,
            **live,
        )

    def poison(self) -> None:
        for output in self.outputs:
            output.fill_(POISON)


@pytest.mark.gpu
def test_a_captured_step_replays_with_fewer_rows() -> None:
    """Live rows get what an eager step gives them, padding keeps its poison, and nothing waits or allocates."""
    step = Step()
    step()  # compiles every kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for live in (ROWS, 4, 1, 0, ROWS):
        step.live.fill_(live)
        step.poison()
        step()
        expected = [output.clone() for output in step.outputs]
        step.poison()
        allocated = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        assert all(torch.equal(a, b) for a, b in zip(step.outputs, expected, strict=True))
        assert step.codes.tolist() == [0] * live + [POISON] * (ROWS - live)
        assert step.mismatch[:, 0].tolist() == [0] * live + [POISON] * (ROWS - live)
        assert torch.equal(step.scan, step.tree)
        assert int((step.scan == POISON).sum()) == ROWS - live
        touched = (step.records != POISON).any(1).nonzero().squeeze(1).tolist()
        assert touched == sorted([*range(8, 8 + live), *range(63, 63 - live, -1)])


@pytest.mark.gpu
def test_a_captured_step_sees_a_flipped_bit() -> None:
    """The replay reads the pool's bytes as they are, not as they were at capture."""
    step = Step()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        check_content(step.rows, step.slots, step.keys, step.content_a, mismatch=step.mismatch, num_live=step.live)
    step.kv.view(torch.int32)[1, 61, 1, 0, 3] ^= 1 << 9
    graph.replay()
    assert step.mismatch[:, 0].tolist() == [0, 0, 0b10, *[0] * (ROWS - 3)]


@pytest.mark.gpu
def test_a_captured_store_replays_with_fewer_rows() -> None:
    """Live rows get the bytes, fingerprints and bits that an eager store gives them."""
    step, k, v = Step(), torch.randn(ROWS, 2, 8, device="cuda"), torch.randn(ROWS, 2, 8, device="cuda")
    twice, times = torch.zeros_like(step.slots), torch.zeros(LAYERS, ROWS, dtype=torch.int64, device="cuda")
    kept = torch.zeros(LAYERS, ROWS, step.rows.words_per_row, dtype=torch.int32, device="cuda")
    copies = kept_rows(step.rows, kept)
    outputs = [step.kv, step.records, step.content_a, twice]
    tables = {"keys": step.keys, "records": step.records, "content_a": step.content_a, "twice": twice}

    def call() -> None:
        for layer in range(LAYERS):
            store(step.rows, layer, step.slots, k, v, kept=kept, times=times, num_live=step.live)
        attest(copies, step.slots, **tables, times=times, num_live=step.live)

    def reset() -> None:
        for output in outputs:
            output.zero_()

    call()  # compiles the kernels before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for live in (ROWS, 4, 1, 0, ROWS):
        step.live.fill_(live)
        reset()
        call()
        expected = [output.clone() for output in outputs]
        reset()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        assert not twice.any()
        assert not times.any()
        assert int(step.kv.any(4).any(3).all(2).sum()) == LAYERS * live
