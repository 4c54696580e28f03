"""Pools whose bytes go: sleep and wake, memory that is allocated anew, and bytes that are copied along."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvcanary import KVCorruptionError, PoolView
from kvcanary.dumps.reading import read_dump
from kvcanary.errors import HookOrderError, PlanError
from kvcanary.replay.replayer import replay
from kvcanary_tools.bench.toy.flavoured import PAGE, FlavouredEngine

PROMPT = list(range(30, 47))


def asleep(engine: FlavouredEngine) -> None:
    engine.canary.on_cleared()
    engine.k, engine.v = [], []


def awake(engine: FlavouredEngine, fill: float = 0.0) -> None:
    engine.k, engine.v = ([torch.full((32 * PAGE, 2, 8), fill) for _ in range(2)] for _ in range(2))
    engine.canary.on_reallocated([engine.view()])


def evict_all(engine: FlavouredEngine) -> None:
    engine.canary.on_evict(list(engine.cache.values()))
    engine.free += engine.cache.values()
    engine.cache.clear()


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
@pytest.mark.parametrize("forgets", [True, False])
def test_a_cache_that_outlives_its_bytes(content, forgets):
    """R12, the bytes are gone, where hashes are kept (vllm-omni#6442); nothing where the cache was emptied."""
    engine = FlavouredEngine(content=content)
    engine.start("before", PROMPT)
    engine.end("before")
    asleep(engine)
    if not forgets:
        evict_all(engine)
    awake(engine)
    if not forgets:
        engine.start("after", PROMPT)
        engine.decode()
        return engine.end("after")
    with pytest.raises(KVCorruptionError) as error:
        engine.start("after", PROMPT)
    finding = error.value.report.findings[0]
    assert (finding.code, finding.position, finding.causes[0].family) == ("R12", 0, "lifetime")
    assert finding.causes[0].text.startswith("the bytes are gone")
    assert "prefill, step 1 wrote the entry before that" in finding.causes[0].evidence
    return None


def test_nothing_is_kept_alive_or_read_while_a_pool_is_gone():
    """The engine's tensors die when it drops them; requests may end and caches be emptied while it sleeps."""
    engine = FlavouredEngine()
    engine.start("before", PROMPT)
    engine.end("before")
    engine.start("runs", PROMPT)
    tensors = [weakref.ref(tensor) for tensor in (*engine.k, *engine.v)]
    asleep(engine)
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * 4
    engine.end("runs", shares=False)
    evict_all(engine)
    with pytest.raises(HookOrderError, match="call on_reallocated"):
        engine.canary.forward("decode", 0, "target")
    awake(engine, fill=float("nan"))
    assert not engine.canary.findings


def test_what_ends_while_a_pool_is_gone_is_not_read():
    """Other bytes lie there by then: a request that ends, and pages that are evicted, are nobody's finding."""
    engine = FlavouredEngine()
    engine.start("before", PROMPT)
    engine.end("before")
    engine.start("runs", PROMPT)
    engine.canary.on_cleared()
    for tensor in (*engine.k, *engine.v):
        tensor.fill_(9)
    engine.end("runs", shares=False)
    evict_all(engine)
    engine.canary.drain()
    assert not engine.canary.findings


def test_memory_is_read_where_it_lies_now():
    """Behind a wake-up, bytes that change are R9 in the new tensors, and pages are poisoned there."""
    engine = FlavouredEngine()
    asleep(engine)
    awake(engine)
    engine.start("one", PROMPT)
    engine.end("one")
    engine.k[1][engine.cache[engine_key(engine)] * PAGE + 1] += 1
    with pytest.raises(KVCorruptionError) as error:
        engine.start("two", PROMPT)
    assert error.value.report.findings[0].code == "R9"


def engine_key(engine: FlavouredEngine):
    return next(iter(engine.cache))


@pytest.mark.parametrize("is_damaged", [True, False])
def test_bytes_that_move_along(is_damaged):
    """`keeps_bytes`: rows go on in new memory, and what the copy changed is R9 there."""
    engine = FlavouredEngine()
    engine.start("runs", PROMPT)
    engine.k, engine.v = ([tensor.clone() for tensor in own] for own in (engine.k, engine.v))
    engine.v[0][engine.slot("runs", 3)] += is_damaged
    engine.canary.on_reallocated([engine.view()], keeps_bytes=True)
    if not is_damaged:
        engine.decode()
        return engine.end("runs")
    with pytest.raises(KVCorruptionError) as error:
        engine.decode()
    finding = error.value.report.findings[0]
    assert (finding.code, finding.position) == ("R9", 3)
    return None


def test_an_engine_that_keeps_its_tensors_gives_none():
    """The same tensors, zeroed: nothing has to be named again; a request that is computed anew goes on."""
    engine = FlavouredEngine()
    engine.start("runs", PROMPT)
    engine.canary.on_cleared()
    for tensor in (*engine.k, *engine.v):
        tensor.zero_()
    engine.canary.on_reallocated()
    engine.preempt("runs")
    engine.prefill("runs")
    engine.decode()
    engine.end("runs")
    assert not engine.canary.findings


def test_tensors_that_are_gone_must_be_named():
    engine = FlavouredEngine()
    asleep(engine)
    with pytest.raises(PlanError, match=r"are gone: give on_reallocated\(\) new views"):
        engine.canary.on_reallocated()


def test_another_layout_is_refused():
    engine = FlavouredEngine()
    k, v = ([torch.zeros(40 * PAGE, 2, 8) for _ in range(2)] for _ in range(2))
    with pytest.raises(PlanError, match="must be laid out as before, num_slots differ"):
        engine.canary.on_reallocated([PoolView("target", k, v, page_size=PAGE, vocab_size=100)])


def test_memory_that_was_left_may_have_another_canary():
    """What a pool lay in is claimed no more, and what it lies in is."""
    engine = FlavouredEngine()
    old = engine.view()
    engine.canary.on_cleared()
    other = FlavouredEngine.__new__(FlavouredEngine)
    other.k, other.v = list(old.k), list(old.v)
    engine.k, engine.v = ([torch.zeros(32 * PAGE, 2, 8) for _ in range(2)] for _ in range(2))
    engine.canary.on_reallocated([engine.view()])
    from kvcanary import CanaryConfig, CanaryManager

    CanaryManager(CanaryConfig(seed=3), [other.view()]).detach()
    with pytest.raises(HookOrderError, match="has a canary already"):
        CanaryManager(CanaryConfig(seed=3), [engine.view()])


def test_a_dump_replays_a_pool_that_went(tmp_path):
    """The event is in it, the bytes need not be."""
    engine = FlavouredEngine(ring=8, dump_dir=str(tmp_path))
    engine.start("before", PROMPT)
    engine.end("before")
    asleep(engine)
    awake(engine)
    with pytest.raises(KVCorruptionError) as error:
        engine.start("after", PROMPT)
    outcome = replay(read_dump(error.value.report.dump))
    assert (outcome.missing, outcome.errors) == ([], [])
