"""What an engine declares of pages, and what is looked at when it does: shares, moves, copies, operations,
quarantine.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from fake_engine import FakeEngine
from kvcanary import CanaryConfig, CanaryManager, KVCorruptionError, LifetimeError, PlanError, PoolView
from kvcanary.config import ROTATION_STEPS
from kvcanary.scrub.prefix_cache import SCRUB_SECONDS
from kvcanary_kernels.record.layout import FREE, QUARANTINED


def flip(engine, slot: int, layer: int = 1) -> None:
    engine.pools["target"].bits(layer, slot, "K")[2] ^= 1 << 3


def first_code(call, *arguments: object) -> tuple[str, int]:
    with pytest.raises(KVCorruptionError) as caught:
        call(*arguments)
    finding = caught.value.findings[0]
    return finding.code, finding.slot


def test_bytes_are_read_before_they_are_shared(make_engine):
    """What was damaged since it was written never gets into a cache unread."""
    engine = make_engine(content="rolling", budget=1)
    engine.start("one", 12)
    engine.step()
    slot = engine.slot("one", 3)
    flip(engine, slot)
    engine.canary.on_share("one", engine.rows["one"].pages[:2])
    assert first_code(lambda: engine.canary.collect(engine.canary.end_step())) == ("R9", slot)


def test_cached_pages_are_read_in_turn(make_engine):
    """Every page that only the cache holds is read within a rotation."""
    engine, pages = cached(make_engine, content="rolling")
    for _ in range(3 * ROTATION_STEPS):
        engine.decode("two")
    assert engine.canary.certificate()["max_unread_steps"] <= ROTATION_STEPS
    assert engine.canary.session.ledger.pages.published[pages].all()


def cached(make_engine, **settings: object) -> tuple[FakeEngine, list[int]]:
    """An engine in whose pools a cache alone holds some pages, and another request runs."""
    engine = make_engine(num_pages=400, **settings)
    engine.start("one", 64)
    engine.start("two", 5)
    engine.step()
    pages = engine.rows["one"].pages[:16]
    engine.canary.on_share("one", pages)
    engine.canary.release("one")
    engine.canary.on_free("one", engine.rows.pop("one").pages)
    return engine, pages


@pytest.mark.parametrize("seconds", [1.0, 7.0])
@pytest.mark.parametrize("place", [0, 9, 15])
def test_cached_pages_are_read_by_the_clock_where_no_step_comes(make_engine, place: int, seconds: float):
    """Whoever asks now and then reads every one of them within SCRUB_SECONDS, and a few at a time."""
    engine, pages = cached(make_engine, content="rolling", mode="log")
    now = [time.monotonic()]
    engine.canary.session.checks.cached.clock = lambda: now[0]
    slot = pages[place] * engine.page_size + 1
    for is_damaged in (False, True):  # the second time round too
        if is_damaged:
            flip(engine, slot)
        for _ in range(math.ceil(SCRUB_SECONDS / seconds)):
            engine.canary.rest()
            now[0] += seconds
    assert [(finding.code, finding.slot) for finding in engine.canary.findings] == [("R9", slot)]
    assert len(pages) == engine.canary.session.ledger.pages.published.sum()


@pytest.mark.parametrize("mode", ["abort", "log"])
def test_a_cache_gives_up_damaged_pages_in_mode_abort_alone(make_engine, mode: str):
    """Those are named until `on_evict` has told that they are gone; in mode log it keeps them."""
    engine, pages = cached(make_engine, content="rolling", mode=mode)
    flip(engine, pages[9] * engine.page_size + 1)
    engine.canary.sweep_cached(pages)
    assert [finding.page for finding in engine.canary.findings] == [pages[9]]
    assert engine.canary.damaged_pages == ({pages[9]} if mode == "abort" else set())
    engine.canary.on_evict(pages[9:10])
    assert engine.canary.damaged_pages == set()


def test_steps_that_are_short_leave_nothing_to_the_clock(make_engine):
    """A rotation of slices within half the time: no page is overdue, nor is one where bytes are not compared."""
    engine, pages = cached(make_engine, content="rolling")
    now = [time.monotonic()]
    sweep = engine.canary.session.checks.cached
    sweep.clock = lambda: now[0]
    for _ in range(3 * ROTATION_STEPS):
        engine.decode("two")
        now[0] += SCRUB_SECONDS / 3 / ROTATION_STEPS
        assert not sweep.overdue()
    now[0] += SCRUB_SECONDS
    assert set(sweep.overdue()) <= set(pages)
    silent, _ = cached(make_engine, content="write")
    silent.canary.session.checks.cached.clock = lambda: now[0] + 10 * SCRUB_SECONDS
    assert not silent.canary.session.checks.cached.overdue()


@pytest.mark.parametrize("content", ["rolling", "full"])
def test_a_hit_reads_all_of_its_pages_at_once(make_engine, content: str):
    """Whatever lies damaged on a cached page is found when a request takes it, before a forward reads it."""
    engine, pages = cached(make_engine, content=content)
    slot = pages[7] * engine.page_size + 2
    flip(engine, slot)
    engine.canary.admit("three", [*range(64), 1])
    engine.canary.on_acquire("three", pages)
    assert first_code(engine.canary.drain) == ("R9", slot)


def test_damage_that_nobody_reads_ends_nobody(make_engine):
    """Mode abort: a damaged page that only the cache holds is told, and the running requests go on."""
    engine = make_engine(mode="abort", content="rolling", num_pages=400)
    engine.start("one", 12)
    engine.start("two", 5)
    engine.step()
    slot = engine.slot("one", 3)
    engine.canary.on_share("one", engine.rows["one"].pages[:2])
    engine.canary.release("one")
    engine.canary.on_free("one", engine.rows.pop("one").pages)
    flip(engine, slot)
    for _ in range(ROTATION_STEPS):
        engine.decode("two")
    assert [(finding.code, finding.slot) for finding in engine.canary.findings] == [("R9", slot)]


@pytest.mark.parametrize("content", ["rolling", "full"])
def test_bytes_that_did_not_arrive_are_found_at_once(make_engine, content):
    """T1 for values that still wait for their fingerprints, and for those that have them; the clean move is silent."""
    engine = make_engine(content=content, page_size=1)
    engine.start("one", 9)
    engine.step()
    kv, row = engine.pools["target"].kv, engine.rows["one"]
    source, destination = engine.slot("one", row.committed - 1), row.pages[-1]
    kv[:, destination] = kv[:, source]
    engine.canary.on_move("target", torch.tensor([source]), torch.tensor([destination]))
    engine.canary.drain()
    kv[2, destination, 0, 1, 3] += 1
    engine.canary.on_move("target", torch.tensor([source]), torch.tensor([destination]))
    assert first_code(engine.canary.drain) == ("T1", destination)


@pytest.mark.parametrize(("disable", "code", "is_source"), [((), "R9", True), (("R9",), "T1", False)])
def test_damage_that_is_moved_along_is_told_where_it_was(make_engine, disable, code, is_source):
    """The move is right: its source did not hold what was written there. Where nobody asks for R9, it is T1."""
    engine = make_engine(content="rolling", page_size=1, disable=frozenset(disable))
    engine.start("one", 9)
    engine.step()
    engine.canary.drain()
    kv, row = engine.pools["target"].kv, engine.rows["one"]
    source, destination = engine.slot("one", row.committed - 1), row.pages[-1]
    kv[2, source, 0, 1, 3] += 1
    kv[:, destination] = kv[:, source]
    engine.canary.on_move("target", torch.tensor([source]), torch.tensor([destination]))
    assert first_code(engine.canary.drain) == (code, source if is_source else destination)


@pytest.mark.parametrize(("content", "found"), [("rolling", []), ("full", ["T1"])])
def test_moved_guesses_are_compared_where_their_bytes_were_kept(make_engine, content, found):
    """Under a byte budget nobody keeps the content of draft entries: their records move, their bytes are not judged."""
    engine = make_engine(mode="log", content=content, page_size=1)
    engine.start("one", 9)
    engine.step()
    kv, row = engine.pools["target"].kv, engine.rows["one"]
    source, destination = engine.slot("one", row.committed - 1), row.pages[-1]
    kv[:, destination] = kv[:, source] + 1
    engine.canary.on_move("target", torch.tensor([source]), torch.tensor([destination]), guesses=True)
    engine.canary.drain()
    assert [finding.code for finding in engine.canary.findings] == found


def test_a_move_leaves_alone_what_does_not_move(make_engine):
    """Null slots, and entries that stay, among others that move: the records of the others alone are written."""
    engine = make_engine(page_size=1)
    engine.start("one", 9)
    engine.step()
    engine.canary.drain()
    kv, row, records = (
        engine.pools["target"].kv,
        engine.rows["one"],
        engine.canary.session.state.by_name["target"].records,
    )
    source, stays, destination = engine.slot("one", row.committed - 1), engine.slot("one", 2), row.pages[-1]
    kv[:, destination], before = kv[:, source], records.clone()
    src, dst = torch.tensor([0, source, stays, -1]), torch.tensor([0, destination, stays, 5])
    engine.canary.on_move("target", src, dst)
    engine.canary.drain()
    assert (records != before).any(1).nonzero().tolist() == [[destination]]


def test_a_move_names_slots_of_its_pools():
    """Beyond the pool's end nothing is written, and whoever asked is told."""
    canary, _ = two_pools()
    with pytest.raises(PlanError, match="of 'device' and 'host', of 64 and 64 slots, got 4 and 64 at most"):
        canary.on_move("device", torch.tensor([4]), torch.tensor([64]), to="host")


def two_pools() -> tuple[CanaryManager, list[torch.Tensor]]:
    """A device pool and a host pool of equal rows, and a draft pool of other ones."""
    tensors = [torch.zeros(2, 64, 2, 4) for _ in range(2)] + [torch.zeros(1, 64, 2, 4)]
    views = [
        PoolView(name, list(kv), list(kv + 0), 4) for name, kv in zip(("device", "host", "draft"), tensors, strict=True)
    ]
    return CanaryManager(CanaryConfig(seed=1), views), tensors


def test_moves_are_between_pools_of_equal_rows():
    """A fingerprint means nothing in a pool whose rows have another shape."""
    canary, _ = two_pools()
    with pytest.raises(PlanError, match="equal rows: 'device' has 2 layers of 16 words, 'draft' 1 of 16"):
        canary.on_move("device", torch.tensor([4]), torch.tensor([5]), to="draft")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_page_that_moves_to_another_pool_takes_its_records_along(make_engine, is_damaged):
    """Two pools of one process: the records arrive under the name of the page's owner, and the bytes are read again."""
    k, v = torch.randn(2, 64, 2, 4), torch.randn(2, 64, 2, 4)
    host_k, host_v = torch.zeros_like(k), torch.zeros_like(v)
    views = [PoolView("device", list(k), list(v), 4), PoolView("host", list(host_k), list(host_v), 4)]
    canary = CanaryManager(CanaryConfig(seed=1), views)
    canary.arm()
    canary.admit("one", [7, 8, 9, 10])
    canary.on_alloc("one", [3], for_load=True)
    canary.on_load_begin("one", [3])
    canary.on_load_end("one", [3], 4)
    src, dst = torch.arange(12, 16), torch.arange(12, 16)
    host_k[:, dst], host_v[:, dst] = k[:, src], v[:, src]
    if is_damaged:
        host_v[1, 14, 0, 2] += 1
    canary.on_move("device", src, dst, to="host")
    if is_damaged:
        with pytest.raises(KVCorruptionError) as caught:
            canary.drain()
        finding = caught.value.findings[0]
        assert (finding.code, finding.pool, finding.slot, finding.position, finding.layer) == ("T1", "host", 14, 2, 1)
    else:
        canary.drain()
        device, host = (canary.session.state.by_name[name].records[12:16] for name in ("device", "host"))
        assert torch.equal(device[:, :3], host[:, :3])  # token, position, chain, request and generation


def test_poison_is_looked_at_before_a_copy_on_write(make_engine):
    """The private copy is a granted page like any other."""
    engine = make_engine(page_size=4, num_pages=64)
    engine.start("old", 64)
    engine.start("one", 12)
    pages = list(engine.rows["old"].pages)
    engine.finish("old")
    while engine.canary.session.poisoner.waiting:
        engine._begin()
        engine.canary.collect(engine.canary.end_step())
    engine.canary.admit("child", engine.rows["one"].tokens)
    shared = engine.rows["one"].pages[:3]
    engine.canary.on_fork("one", "child", shared)
    engine.pools["target"].kv[0, pages[0] * 4 + 1, 0, 0, 0] = 5.0
    engine.canary.on_copy("child", shared[2], pages[0])
    assert first_code(engine.canary.drain) == ("P1", pages[0] * 4 + 1)


def test_a_page_is_not_freed_while_a_copy_is_on_its_way(make_engine):
    """O1: the copy would land in a page of somebody else."""
    engine = make_engine(mode="log")
    engine.start("one", 9)
    page = engine.rows["one"].pages[1]
    engine.canary.async_tracker.issue("upload", "copies", writes=[page])
    engine.finish("one")
    engine.canary.drain()
    assert [finding.code for finding in engine.canary.findings] == ["O1"]
    assert "'free' on stream host touches page" in engine.canary.findings[0].found["access"]


def test_a_copy_that_lands_in_a_page_granted_anew_is_told(make_engine):
    """O1: at the end of the copy the page was in another generation."""
    engine = make_engine(mode="log")
    engine.start("one", 9)
    engine.start("two", 9)
    page = engine.rows["one"].pages[1]
    op = engine.canary.async_tracker.issue("upload", "copies", writes=[page])
    engine.canary.session.ledger.free("one", [page], 1)  # behind the tracker's back
    engine.canary.session.ledger.grant("two", [page], 1)
    engine.canary.async_tracker.complete(op)
    engine.canary.drain()
    assert "which is in 3 now" in engine.canary.findings[0].found["access"]


def test_a_page_granted_in_this_step_is_known_to_its_checks(make_engine):
    """An unwritten slot of a fresh page is R12, not R7: events are true before anything is judged."""
    engine = make_engine(page_size=4)
    engine.start("one", 8)
    engine._begin()
    engine._reserve("one", 40)
    fresh = engine.rows["one"].pages[-1] * 4
    engine._prefix = lambda name: [*(engine.slot(name, position) for position in range(7)), fresh]
    rows = {"one": engine.rows["one"]}
    engine._verify(rows)
    assert first_code(lambda: engine.canary.collect(engine.canary.end_step())) == ("R12", fresh)


def test_a_private_copy_bears_the_name_of_its_owner(make_engine):
    """Copy on write: the records of the copy are the child's, under the grant of the copy's page."""
    engine = make_engine(page_size=4, num_pages=64)
    engine.start("one", 12)
    shared, copy = engine.rows["one"].pages[:3], engine.free_pages[0]
    engine.canary.admit("child", engine.rows["one"].tokens)
    engine.canary.on_fork("one", "child", shared)
    engine.canary.on_copy("child", shared[2], copy)
    src, dst = (torch.arange(page * 4, page * 4 + 4) for page in (shared[2], copy))
    for pool in ("target", "draft"):
        engine.pools[pool].kv[:, dst] = engine.pools[pool].kv[:, src]
        engine.canary.on_move(pool, src, dst)
    engine.canary.drain()
    uids = [request.uid for request in engine.canary.session.ledger.known(["one", "child"])]
    records = engine.canary.session.state.by_name["target"].records
    assert [int(records[page * 4, 2]) & 0xFFFFFFFF for page in (shared[2], copy)] == uids
    assert int(records[copy * 4, 2]) >> 32 == engine.canary.session.ledger.generations[copy]


def test_the_certificate_claims_only_what_can_fire(make_engine):
    """Checks that these settings and this engine cannot feed are inactive, each with its reason."""
    engine = make_engine(poison="off", content="write")
    inactive = engine.canary.certificate()["inactive_classes"]
    assert {code for code, reason in inactive.items() if reason == "not fed"} == {
        *("W7", "W9", "P1", "T1", "O1", "X1", "X2")
    }
    assert inactive["H2"] == "an error at once, in every mode"
    engine.canary.async_tracker.issue("upload", "copies", writes=["buffer"])
    assert "O1" in engine.canary.certificate()["classes"]


def test_static_substeps_and_quarantine_feed_their_checks():
    """W9 is judged in captured substeps, W7 where an engine holds freed pages back."""
    views = [PoolView("only", [torch.zeros(64, 2, 4)], [torch.zeros(64, 2, 4)], 4)]
    canary = CanaryManager(CanaryConfig(), views, holds_back=True)
    assert canary.registry is canary.registry
    assert {"W7", "W9", "P1", "T1"} <= set(canary.certificate()["classes"])


def test_pages_whose_wait_is_over_are_ready_when_their_step_begins():
    """They have left their quarantine behind the step before, while a device computes; or in a step that comes late."""
    views = [PoolView("only", [torch.zeros(64, 2, 4)], [torch.zeros(64, 2, 4)], 4)]
    canary = CanaryManager(CanaryConfig(quarantine=3), views, holds_back=True)
    canary.arm()
    canary.admit("one", [1, 2, 3])
    canary.begin_step(1)
    canary.on_alloc("one", [2, 5])
    canary.on_free("one", [2])
    states, seen = canary.session.ledger.states, []
    for step in (2, 3):
        canary.collect(canary.end_step())
        seen.append(int(states[2]))
        canary.begin_step(step)
    canary.on_free("one", [5])
    canary.collect(canary.end_step())
    seen.append(int(states[2]))
    canary.begin_step(9)
    assert (seen, int(states[5])) == ([QUARANTINED, QUARANTINED, FREE], FREE)
    assert [(event.kind, event.step) for event in canary.session.ledger.history.of(2)[-1:]] == [("left quarantine", 4)]
    assert [(event.kind, event.step) for event in canary.session.ledger.history.of(5)[-1:]] == [("left quarantine", 9)]


@pytest.mark.parametrize("page", [10**6, -3, 0])
def test_a_page_outside_the_pool_is_refused_in_words(page):
    """Also where the engine holds pages back, and by operations: the pages are named before anything is touched."""
    views = [PoolView("only", [torch.zeros(64, 2, 4)], [torch.zeros(64, 2, 4)], 4)]
    canary = CanaryManager(CanaryConfig(), views, holds_back=True)
    canary.arm()
    canary.admit("one", [1, 2, 3])
    for call in (
        lambda: canary.on_alloc("one", [page]),
        lambda: canary.async_tracker.issue("copy", "s", writes=[page]),
    ):
        with pytest.raises(LifetimeError, match=r"page must be in \[1, 16\), got"):
            call()


def test_warm_up_takes_latent_rows_and_extras():
    """Before arm() a substep takes whatever values the pool has."""
    views = [PoolView("only", [torch.zeros(64, 2, 4)], None, 4)]
    canary = CanaryManager(CanaryConfig(), views)
    substep = canary.forward("decode", 0, "only")
    substep.store(0, torch.zeros(1, 2, 4))
    substep.store(0, torch.zeros(1, 2, 4), None, torch.zeros(1, 2))
    assert canary.certificate()["forwards"] == 0


@pytest.mark.parametrize("shape", [(2, 6, 6), (1, 5, 5)])
def test_a_tree_mask_of_another_tree_is_refused(make_engine, shape):
    """The mask must be one square a row, as wide as the row writes."""
    engine = make_engine(num_nodes=6)
    engine.start("one", 9)
    mask = torch.ones(shape, dtype=torch.bool)
    engine.change_read = lambda kind, index, pool, plan: replace(plan, tree_mask=mask) if kind == "verify" else plan
    with pytest.raises(PlanError, match=r"tree_mask must be \[1, N, N\] for rows that write N entries each, got"):
        engine.step()
