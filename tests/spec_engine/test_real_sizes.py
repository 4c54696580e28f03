"""Checks of sizes look at the arrays themselves: one that is smaller than planned is a typed error, canary off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary import faults, invariants
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine import assembly as assembly_module
from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward
from spec_engine.memory import sizing
from spec_engine.memory.cache import host_tier as host_tier_module
from spec_engine.memory.pools.fp8_pool import Fp8Pool
from spec_engine.memory.request_table import RequestTable
from spec_engine.step import results as results_module

SETTINGS = {
    "dtype": "float64",
    "page_size": 1,
    "topk": 1,
    "num_steps": 3,
    "max_total_tokens": 512,
    "context_length": 40,
}
CAPTURED = {"graphs": "on", "graph_buckets": [2]}


def make(folder, **settings) -> Engine:
    return Engine(EngineConfig(model=str(folder), **SETTINGS | {"max_running_requests": 2} | settings))


@pytest.fixture
def narrow(monkeypatch):
    """Tensors of request tables have 16 columns less than was planned."""
    build = RequestTable.__init__

    def built(table, *sizes):
        build(table, *sizes)
        table.table = table.table[:, :-16].contiguous()

    monkeypatch.setattr(RequestTable, "__init__", built)
    return monkeypatch


@pytest.mark.parametrize("settings", [{}, {"page_size": 16, "topk": 4}, CAPTURED], ids=["eager", "pages", "captured"])
def test_a_table_that_is_narrower_than_planned_is_refused_at_start(toy_model, narrow, settings):
    """Before anything is written, whatever the length of the requests to come."""
    with pytest.raises(invariants.RowOverflowError, match=r"request table have \d+ columns, .* need \d+"):
        make(toy_model, **settings)


@pytest.mark.parametrize("settings", [{}, CAPTURED], ids=["eager", "captured"])
def test_a_row_ends_where_its_tensor_does(toy_model, narrow, settings):
    """A request that outgrows it is stopped before its slots go into its neighbour's row."""
    narrow.setattr(assembly_module, "check_row_width", lambda *sizes: None)
    engine = make(toy_model, **settings)
    engine.submit(list(range(1, 9)), SamplingParams(max_new_tokens=32, ignore_eos=True))
    row, width = 1, engine.request_table.table.shape[1]
    with pytest.raises(invariants.RowOverflowError, match=rf"row {row} needs columns .*, its width is {width}: "):
        list(engine._events())
    assert width == engine.sizes.row_width - 16
    assert not engine.request_table.table[[0, 2]].any()


def test_a_row_that_the_tensor_lacks_is_nobodys(toy_model):
    """A table of fewer rows than requests may hold."""
    engine = make(toy_model)
    engine.request_table.table = engine.request_table.table[:1]
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4))
    with pytest.raises(invariants.RowOwnershipError, match="row 1 of 1 to 0 used"):
        engine.step()


@pytest.mark.parametrize("kind", ["draft", "verify", "decode", "extend"])
def test_an_index_buffer_that_is_too_short_is_refused_when_it_is_made(monkeypatch, kind):
    """With topk, requests, the width of a row and what is written, whichever forward it is of."""
    own = faults.seam
    monkeypatch.setattr(
        "spec_engine.graphs.forward.seam", lambda name, indices, **where: own(name, indices, **where)[:-1]
    )
    words = rf"^{kind}\[2\]: topk 3 \* requests 2 \* \(row width 20 \+ own slots 3\) = 138 index entries <= size 137 of"
    with pytest.raises(invariants.IndexBufferError, match=words):
        StaticForward.allocate(kind, 2, torch.zeros(3, 20).long(), requests=2, new=1, width=3, ancestors=2)


def test_the_fault_makes_a_buffer_of_one_branch(toy_model):
    """Armed it shortens the buffers of draft forwards, and no other."""
    with faults.arm("bounds.kv_indices_without_topk") as armed:
        with pytest.raises(invariants.IndexBufferError, match=r"^draft\[0\]: topk 4 \* requests 2 \* "):
            make(toy_model, topk=4, **CAPTURED)
        assert armed.num_strikes == 1
        make(toy_model, draft="none", **CAPTURED)
    assert armed.num_strikes == 1


@pytest.mark.parametrize("backend", ["torch", "paged"])
def test_branches_leave_room_for_the_tail_that_is_copied_before_the_next(toy_model, monkeypatch, backend):
    """Pages for T slots without the tail: who reads token by token has no hole to fill, whole pages would overlap."""
    short = lambda tail, num_steps, page_size: sizing.cdiv(0 * tail + num_steps, page_size)  # noqa: E731
    monkeypatch.setattr("spec_engine.drafting.layout.pages_per_branch", short)
    engine = make(toy_model, page_size=4, topk=3, num_steps=4, attention_backend=backend, context_length=60)
    engine.submit(list(range(1, 11)), SamplingParams(max_new_tokens=8, ignore_eos=True))
    if backend == "torch":
        list(engine._events())
        return
    engine.step()
    with pytest.raises(invariants.BranchLayoutError, match=r"4 slots from 10, 4 apart, .* nor the 2 copied slots"):
        engine.step()


def test_every_part_of_a_pool_has_its_slots(toy_model, monkeypatch):
    """Scales of an 8-bit pool lie in a tensor of their own."""
    build = Fp8Pool.__init__

    def built(pool, *names, **settings):
        build(pool, *names, **settings)
        pool.parts = (pool.parts[0], pool.parts[1][:, :-1])

    monkeypatch.setattr(Fp8Pool, "__init__", built)
    with pytest.raises(invariants.PoolSizeError, match="pool 'target' has 512 slots, 512 pages and the null page"):
        make(toy_model, kv_cache_dtype="fp8_e4m3", dtype="float32")


def test_host_memory_has_the_pages_of_its_tier(toy_model, monkeypatch):
    """Rows of the host that are fewer than the tier's pages."""
    rows = host_tier_module.HostRows
    monkeypatch.setattr(host_tier_module, "HostRows", lambda pool, num_rows: rows(pool, num_rows - 1))
    with pytest.raises(invariants.PoolSizeError, match="pool 'target on the host' has 8 slots, 8 pages and the null"):
        make(toy_model, host_pages=8)


def test_a_section_of_a_feed_does_not_run_into_the_next():
    """More rows than a captured program has are refused, and nothing is written behind them."""
    feed = Feed({"rows": 2, "live": 1}, torch.device("cpu"))
    with pytest.raises(invariants.StagingError, match="3 numbers are put into 'rows', which has room for 2"):
        feed.set(rows=[4, 5, 6])
    feed.send()
    assert feed["live"].tolist() == [0]


def test_a_ring_too_small_for_a_step_is_refused(toy_model, monkeypatch):
    """Buffers sized for smaller trees than are drafted."""
    build = results_module.Results
    monkeypatch.setattr(
        assembly_module, "Results", lambda *parts, **sizes: build(*parts, **sizes | {"max_nodes": 0, "max_accept": 1})
    )
    engine = make(toy_model, schedule="overlap", **CAPTURED)
    with pytest.raises(invariants.StagingError, match=r"numbers are put into 'results', which has room for 4: size it"):
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, ignore_eos=True))


@pytest.mark.parametrize("settings", [{}, {"page_size": 16, "topk": 4}, CAPTURED], ids=["eager", "pages", "captured"])
def test_arrays_as_planned_are_silent(toy_model, settings):
    """The clean twin: to the end of the context, where rows are longest."""
    engine = make(toy_model, **settings)
    [output] = engine.generate([list(range(1, 9))], SamplingParams(max_new_tokens=32, ignore_eos=True))
    assert len(output.token_ids) == 32


def test_constants_of_another_chain_are_refused(monkeypatch):
    """Views of other constants, and constants whose rows are no chain."""
    from spec_engine.drafting import chain

    long, short = chain.ChainConstants(2, 4, 5), chain.ChainConstants(2, 2, 3)
    stale = replace(short.tree(torch.zeros(2, 3).long()), parents=long.tree(torch.zeros(2, 5).long()).parents[:, -3:])
    monkeypatch.setattr(short, "tree", lambda tokens: stale)
    with pytest.raises(invariants.ChainConstantsError, match="parents, depths and mask of a chain of 3 nodes must be"):
        chain.build_chain_tree(torch.zeros(2).long(), [torch.zeros(2, 1).long()] * 2, 3, short)
    build = chain.build_tree
    for name, words in (
        ("parents", "parents of a chain"),
        ("depths", "depths of a chain"),
        ("mask", "mask of a chain"),
    ):
        whole = lambda *reported, name=name: replace(tree := build(*reported), **{name: getattr(tree, name).roll(1, 1)})  # noqa: E731
        monkeypatch.setattr(chain, "build_tree", whole)
        with pytest.raises(invariants.ChainConstantsError, match=f"^{words} of 4 nodes must be"):
            chain.ChainConstants(2, 3, 4)
