"""Bytes that come back from a host tier with their records, and pages that are replaced by equal ones of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kvcanary import CanaryConfig, Finding, KVCorruptionError, LifetimeError, PlanError
from kvcanary.errors import ForeignSnapshotError
from kvcanary.transfers.snapshots import MOST_PREPARED
from kvcanary_kernels.record.layout import NEVER_WRITTEN, TOKEN_POSITION
from kvcanary_tools.bench.toy.engine import ToyEngine
from toy_tier import TOKENS, Tier


@pytest.fixture
def make_toy() -> Iterator[Callable[..., ToyEngine]]:
    """A toy engine by settings of CanaryConfig."""
    with torch.inference_mode():
        yield lambda **settings: ToyEngine(CanaryConfig(**{"content": "full", "seed": 7, **settings}))


def found(run: Callable[..., object], *arguments: object) -> list[Finding]:
    """The findings with which a call is stopped."""
    with pytest.raises(KVCorruptionError) as caught:
        run(*arguments)
    return list(caught.value.findings)


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
def test_restored_pages_are_right(make_toy, content):
    """They are read, committed, published and drafted behind like pages that forwards have written."""
    tier = Tier(make_toy(content=content))
    tier.bring_back()
    tier.go_on()
    assert tier.engine.share("back") >= 2
    tier.engine.decode()
    tier.engine.finish("back")
    assert tier.engine.canary.findings == []


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_bytes_that_came_back_changed_are_found_at_once(make_toy, pool):
    """T1, at the slot and layer, before a forward reads them; not when moves are not compared."""
    tier = Tier(make_toy())
    tier.bytes[pool].view(torch.int32)[0, 5, 1, 0, 2] ^= 1 << 20
    row = tier.bring_back()
    (finding,) = found(lambda: tier.engine.canary.collect(tier.engine.canary.end_step()))
    assert (finding.code, finding.pool, finding.slot, finding.position) == ("T1", pool, int(row.slots[5]), 5)
    assert (finding.layers, finding.owner) == ((0,), "back")


def begin_load(tier: Tier) -> list[int]:
    """A request whose pages wait for the bytes of the tier."""
    engine = tier.engine
    engine.begin()
    engine.admit("back", TOKENS)
    pages: list[int] = engine.pages.take(tier.num_pages, engine.num_steps)
    engine.canary.on_alloc("back", pages, for_load=True)
    engine.canary.on_load_begin("back", pages)
    return pages


def records_of(engine: ToyEngine) -> list[torch.Tensor]:
    """All that is known of entries and their bytes."""
    pools = engine.canary.session.state.pools
    return [values.clone() for pool in pools for values in (pool.records, pool.expected, pool.content_a)]


@pytest.mark.parametrize("damage", [False, True])
def test_a_prepared_load_is_any_other(make_toy, damage):
    """Nothing changes while bytes travel, for a step or more; then records, fingerprints and findings are the same."""
    left, codes = [], []
    for is_prepared in (False, True):
        tier = Tier(make_toy(mode="log"))
        pages, canary = begin_load(tier), tier.engine.canary
        if is_prepared:
            before = records_of(tier.engine)
            canary.prepare_load("back", pages, tier.length, tier.snapshot)
            assert all(map(torch.equal, before, records_of(tier.engine)))
            assert len(canary.session.checks.snapshots._prepared) == 1
        canary.collect(canary.end_step())
        tier.engine.begin()
        for pool, kept in tier.bytes.items():
            tier.engine.pools[pool].kv[:, tier.engine._slots_of(pages)] = kept
        if damage:
            tier.engine.pools["target"].kv.view(torch.int32)[0, tier.engine._slots_of(pages)[5], 1, 0, 2] ^= 1 << 20
        canary.on_load_end("back", pages, tier.length, tier.snapshot)
        canary.collect(canary.end_step())
        left.append(records_of(tier.engine))
        codes.append([(finding.code, finding.position, finding.layers) for finding in canary.findings])
        assert canary.session.checks.snapshots._prepared == {}
    assert all(map(torch.equal, *left))
    assert codes == [[("T1", 5, (0,))] if damage else []] * 2


def test_what_was_prepared_for_another_load_is_not_taken(make_toy):
    """Fewer positions, and pages that were granted anew: what comes back is judged as it is told then."""
    tier = Tier(make_toy())
    pages, engine = begin_load(tier), tier.engine
    engine.canary.prepare_load("back", pages, tier.length, tier.snapshot)
    for pool, kept in tier.bytes.items():
        engine.pools[pool].kv[:, engine._slots_of(pages)] = kept
    engine.canary.on_load_end("back", pages, tier.length - 1, tier.snapshot)
    target = engine.canary.session.state.pools[0]
    slots = engine._slots_of(pages)
    assert (target.records[slots, 0] != target.records[0, 0]).tolist() == [True] * 7 + [False]


@pytest.mark.parametrize("name", ["again", "back"])
def test_grants_of_then_are_not_those_of_now(make_toy, name):
    """A load that failed, into pages that come to another request, or are granted anew: what was prepared is old."""
    tier = Tier(make_toy(quarantine=0))
    pages, engine = begin_load(tier), tier.engine
    engine.canary.prepare_load("back", pages, tier.length, tier.snapshot)
    engine.canary.on_load_fail("back", pages)
    if name == "again":
        engine.canary.release("back")
        engine.canary.admit("again", TOKENS)
    engine.canary.on_free("back", pages)
    engine.canary.on_alloc(name, pages, for_load=True)
    engine.canary.on_load_begin(name, pages)
    for pool, kept in tier.bytes.items():
        engine.pools[pool].kv[:, engine._slots_of(pages)] = kept
    engine.canary.on_load_end(name, pages, tier.length, tier.snapshot)
    engine.canary.commit(name, tier.length)
    engine.canary.collect(engine.canary.end_step())
    assert engine.canary.findings == []
    ledger, target = engine.canary.session.ledger, engine.canary.session.state.pools[0]
    owners = target.records[engine._slots_of(pages), 2].tolist()
    size = engine.shape.page_size
    due = [int(ledger.generations[page]) << 32 | ledger.request(name).uid for page in pages for _ in range(size)]
    assert owners == due


def test_what_is_wrong_with_a_load_its_end_says(make_toy):
    """Nothing is prepared for a request that is unknown, pages of others, or a snapshot of another canary."""
    tier = Tier(make_toy())
    pages, canary = begin_load(tier), tier.engine.canary
    foreign = replace(tier.snapshot, seed_id="ffff")
    canary.prepare_load("nobody", pages, tier.length, tier.snapshot)
    canary.prepare_load("back", [pages[0], max(pages) + 1], tier.length, tier.snapshot)
    canary.prepare_load("back", pages[:1], tier.length, tier.snapshot)
    canary.prepare_load("back", pages, tier.length, foreign)
    assert canary.session.checks.snapshots._prepared == {}
    with pytest.raises(ForeignSnapshotError):
        canary.on_load_end("back", pages, tier.length, foreign)


def test_few_loads_are_prepared_at_once(make_toy):
    """One that never ends keeps no memory for long."""
    tier = Tier(make_toy())
    pages = begin_load(tier)
    for _ in range(MOST_PREPARED + 3):
        tier.engine.canary.prepare_load("back", pages, tier.length, tier.snapshot.behind(0))
    assert len(tier.engine.canary.session.checks.snapshots._prepared) == MOST_PREPARED


def test_bytes_that_changed_before_they_left_are_found_too(make_toy):
    """The fingerprints are those of the stores, not of what was put away."""
    engine = make_toy(content="rolling")
    finish = engine.finish
    engine.finish = lambda name: None
    tier = Tier(engine)
    word = engine.pools["target"].kv.view(torch.int32)[1, tier.slots[3], 0, 0]
    word ^= 1
    tier.bytes["target"] = engine.pools["target"].kv[:, tier.slots].clone()
    word ^= 1
    finish("away")
    tier.bring_back()
    (finding,) = found(lambda: engine.canary.collect(engine.canary.end_step()))
    assert (finding.code, finding.position, finding.layers) == ("T1", 3, (1,))


def test_a_record_that_was_damaged_before_it_left_comes_back_so(make_toy):
    """The next read of the entry finds it, wherever it lies now."""
    tier = Tier(make_toy())
    kept = tier.snapshot.contents[0]
    kept.damage[5, TOKEN_POSITION] = 1 << 32
    row = tier.bring_back()
    pool = tier.engine.canary.session.state.pools[0]
    slots = row.slots[: tier.length]
    assert torch.equal(pool.records[slots] - pool.expected[slots], kept.damage)
    assert {finding.code for finding in found(tier.go_on)} & {"R3", "R4"}


@pytest.mark.parametrize("settings", [{"disable": {"T1"}}, {"content": "write"}], ids=str)
def test_without_t1_nothing_is_compared(make_toy, settings):
    """The certificate says that moves are not compared."""
    tier = Tier(make_toy(**settings))
    tier.bytes["target"].view(torch.int32)[0, 5, 1, 0, 2] ^= 1 << 20
    tier.bring_back()
    tier.engine.canary.collect(tier.engine.canary.end_step())
    assert "T1" not in tier.engine.canary.certificate()["classes"]


def test_pages_of_another_prefix_are_another_row(make_toy):
    """Whole pages of other tokens, restored for this request: its first forward says so."""
    tier = Tier(make_toy())
    tier.bring_back("other", [1, *TOKENS[1:]])
    tier.engine.rows["other"].committed = 8
    tier.engine.canary.commit("other", 8)
    assert {finding.code for finding in found(tier.engine.prefill, {"other": 10})} & {"R5", "R6"}


def test_pages_that_came_back_exchanged_are_found(make_toy):
    """Each page has its own records, so its bytes are those of another one."""
    tier = Tier(make_toy())
    tier.bytes = {name: kept.roll(4, 1) for name, kept in tier.bytes.items()}
    tier.bring_back()
    assert {finding.code for finding in found(lambda: tier.engine.canary.collect(tier.engine.canary.end_step()))} == {
        "T1"
    }


def test_a_slot_that_was_never_written_is_not_restored(make_toy):
    """Of a page that is not full the entries that were written come back, and a row may not reach further."""
    engine = make_toy()
    engine.start("away", 6)
    snapshot = engine.canary.on_offload(engine.rows["away"].pages)
    assert snapshot.contents[0].current.tolist() == [True] * 6 + [False] * 2


def test_each_page_has_its_own_records(make_toy):
    """A number of pages that does not fit is a mistake of the caller."""
    engine = make_toy()
    engine.start("only", 6)
    snapshot = engine.canary.on_offload(engine.rows["only"].pages)
    with pytest.raises(PlanError, match="got 1 for 2: pack and load the same pages"):
        engine.canary.on_restore("only", [3], 4, snapshot)


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_a_snapshot_of_another_seed_is_refused_with_both(make_toy, mode):
    """The bytes are right and nothing is compared: the error names both seed ids, and nothing has happened."""
    here, other = make_toy(mode=mode), make_toy(seed=8)
    tier, foreign = Tier(here), Tier(other)
    ids = [engine.canary.certificate()["seed_id"] for engine in (other, here)]
    tier.snapshot = foreign.snapshot
    words = f"got one of seed id {ids[0]} for {ids[1]}: give both canaries one seed"
    if mode == "raise":
        with pytest.raises(ForeignSnapshotError, match=words) as caught:
            tier.bring_back()
        assert (caught.value.found, caught.value.expected) == tuple(ids)
        assert all(here.canary.session.ledger.states[page] == NEVER_WRITTEN for page in here.rows["back"].pages)
        return
    tier.bring_back()
    here.canary.collect(here.canary.end_step())
    [finding] = here.canary.findings
    assert finding.code == "L1"
    assert words in finding.sentence


def test_a_snapshot_of_the_same_seed_is_taken_from_another_canary(make_toy):
    """Equal keys make equal fingerprints: what one canary packed another compares."""
    here, other = make_toy(), make_toy()
    tier, foreign = Tier(here), Tier(other)
    tier.snapshot, tier.bytes = foreign.snapshot, foreign.bytes
    tier.bring_back()
    tier.go_on()
    assert not here.canary.findings


def test_a_snapshot_of_other_pools_is_refused_with_both(make_toy):
    """Other names or rows of another size: what was packed there says nothing of what lies here."""
    tier = Tier(make_toy())
    layouts = tier.snapshot.layouts
    tier.snapshot = replace(tier.snapshot, layouts=(replace(layouts[0], name="other", words=8), *layouts[1:]))
    with pytest.raises(ForeignSnapshotError, match=r"got one of other: 2 layers of 8 words.* for target: .* layers of"):
        tier.bring_back()


def test_only_pages_that_hold_nothing_are_restored(make_toy):
    """A page that was written already keeps its records."""
    engine = make_toy()
    engine.start("only", 6)
    snapshot = engine.canary.on_offload(engine.rows["only"].pages)
    with pytest.raises(LifetimeError, match="restore only into pages that hold nothing yet"):
        engine.canary.on_restore("only", engine.rows["only"].pages, 6, snapshot)


# deduplication


def twice(engine: ToyEngine) -> tuple[int, int]:
    """Two requests that computed the same tokens; the first page of the second, and the cache's equal one."""
    engine.start("first", TOKENS)
    engine.share("first")
    engine.start("second", TOKENS)
    return engine.rows["second"].pages[0], engine.rows["first"].pages[0]


def deduplicate(engine: ToyEngine, page: int, kept: int) -> None:
    row = engine.rows["second"]
    place = row.pages.index(page)
    engine.canary.on_deduplicate("second", page, kept)
    row.pages[place], row.slots[4 * place : 4 * place + 4] = kept, engine._slots_of([kept])
    engine.pages.hold([kept])
    engine.pages.drop([page], engine.num_steps)


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
def test_a_page_that_the_cache_has_already_is_replaced(make_toy, content):
    """The row goes on over the cache's page; its own is free, and may be granted again."""
    engine = make_toy(content=content)
    page, kept = twice(engine)
    deduplicate(engine, page, kept)
    assert engine.canary.session.ledger.refcounts[kept] == 2
    for name in ("second", "first"):
        engine.draft()
        engine.finish(name)
    assert engine.canary.findings == []
    freed = engine.canary.certificate()["freed_unread_bytes"]
    assert (freed > 0) == (content == "write")


def test_a_page_that_is_given_up_is_read_before(make_toy):
    """Nothing is freed unread."""
    engine = make_toy(content="rolling")
    page, kept = twice(engine)
    engine.pools["target"].kv[0, 4 * page + 1] += 1
    deduplicate(engine, page, kept)
    (finding,) = found(lambda: engine.canary.collect(engine.canary.end_step()))
    assert (finding.code, finding.slot) == ("R9", 4 * page + 1)


def test_the_page_that_is_kept_is_read(make_toy):
    """A row takes over no damage of the cache."""
    engine = make_toy(content="rolling")
    page, kept = twice(engine)
    engine.pools["target"].kv[0, 4 * kept + 1] += 1
    deduplicate(engine, page, kept)
    assert ("R9", 4 * kept + 1) in {
        (finding.code, finding.slot) for finding in found(lambda: engine.canary.collect(engine.canary.end_step()))
    }


def test_a_page_that_is_not_equal_is_another_row(make_toy):
    """The cache's page holds other tokens: the row's next forward says so."""
    engine = make_toy()
    page, _ = twice(engine)
    deduplicate(engine, page, engine.rows["first"].pages[1])
    assert {finding.code for finding in found(engine.draft, "second")} & {"R4", "R5"}


def test_a_page_is_replaced_by_a_published_one_only(make_toy):
    """Another request's private page is nobody's to name."""
    engine = make_toy()
    engine.start("first", TOKENS)
    engine.start("second", TOKENS)
    with pytest.raises(LifetimeError, match="must be SHARED to be acquired"):
        engine.canary.on_deduplicate("second", engine.rows["second"].pages[0], engine.rows["first"].pages[0])
