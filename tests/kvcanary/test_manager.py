"""CanaryManager on right traffic: nothing is found, everything is counted, and the certificate says so."""

from __future__ import annotations

import json

import pytest
import torch

from kvcanary import (
    CanaryConfig,
    CanaryManager,
    HookOrderError,
    KVCorruptionError,
    PlanError,
    PoolView,
    ReadPlan,
    WritePlan,
)
from kvcanary.config import ROTATION_STEPS
from kvcanary.errors import PageReferenceError
from kvcanary.manager.manager import MOST_UNCOLLECTED

KEYS = {
    "mode",
    "content",
    "forwards",
    "slots_checked",
    "bytes_checked",
    "live_bytes",
    "max_unread_steps",
    "freed_unread_bytes",
    "classes",
    "unchecked",
    "findings",
}
CONTENTS = ["write", "rolling", "full"]


def traffic(engine, steps: int = 6) -> None:
    """Two requests that overlap: chunked prefill, drafting, plain decode, and one that ends early."""
    engine.start("first", 13, chunks=3)
    engine.step()
    engine.start("second", 5)
    for _ in range(steps):
        engine.step()
    engine.decode()
    engine.step("second")
    engine.finish("first")
    engine.step()
    engine.start("third", 9, chunks=2)
    engine.step()
    for name in list(engine.rows):
        engine.finish(name)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_a_right_engine_has_no_finding(make_engine, content, dtype, page_size, topk):
    """Prefill, drafting, decode, moves and release raise nothing, and tokens leave."""
    engine = make_engine(content=content, dtype=dtype, page_size=page_size, topk=topk, num_pages=640 // page_size)
    traffic(engine)
    assert engine.canary.findings == []
    certificate = engine.canary.certificate()
    assert certificate["findings"] == []
    assert certificate["unchecked"].keys() <= {"freed pages reused before they were poisoned"}
    assert certificate["forwards"] > 40
    assert engine.tokens_emitted > 20


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_has_no_finding(make_engine, seed):
    """Any order of starts, steps, decodes and ends of right requests passes."""
    engine = make_engine(seed=seed, content="full", num_pages=400)
    for number in range(20):
        action = engine.random.choice(["start", "step", "step", "decode", "finish"])
        if action == "start" or not engine.rows:
            engine.start(f"r{number}", engine.random.randrange(2, 20), chunks=engine.random.choice([1, 2]))
        elif action == "finish":
            engine.finish(engine.random.choice(list(engine.rows)))
        else:
            getattr(engine, action)()
    engine.canary.drain()
    assert engine.canary.findings == []
    assert engine.canary.certificate()["slots_checked"] > 0


@pytest.mark.parametrize("content", CONTENTS)
def test_the_certificate_has_every_key_as_plain_json(make_engine, content):
    """The keys that readers rely on are there, and the whole survives JSON."""
    engine = make_engine(content=content)
    traffic(engine)
    certificate = engine.canary.certificate()
    assert certificate.keys() >= KEYS
    assert json.loads(json.dumps(certificate)) == certificate
    assert (certificate["mode"], certificate["content"]) == ("raise", content)


@pytest.mark.parametrize(("content", "active"), [("write", False), ("rolling", True), ("full", True)])
def test_content_write_does_not_claim_r9(make_engine, content, active):
    """Where bytes are never compared the certificate lists R9 as inactive."""
    certificate = make_engine(content=content).canary.certificate()
    assert ("R9" in certificate["classes"]) is active
    assert ("R9" in certificate["inactive_classes"]) is not active


@pytest.mark.parametrize("content", ["rolling", "full"])
def test_no_committed_byte_is_freed_unread(make_engine, content):
    """A request that is released has had its last re-read before its pages go."""
    engine = make_engine(content=content)
    traffic(engine)
    certificate = engine.canary.certificate()
    assert certificate["freed_unread_bytes"] == 0
    assert certificate["bytes_checked"] > 0


def test_content_write_counts_what_was_freed_unread(make_engine):
    """Without re-reads every committed byte that is freed was never looked at."""
    engine = make_engine(content="write")
    engine.start("only", 11)
    engine.step()
    live = engine.canary.certificate()["live_bytes"]
    engine.finish("only")
    certificate = engine.canary.certificate()
    assert live > 0
    assert certificate["freed_unread_bytes"] >= live
    assert certificate["bytes_checked"] == 0


def test_live_bytes_are_the_committed_slots_of_all_pools(make_engine):
    """After a prefill each pool holds the prompt; after the end nothing is live."""
    engine = make_engine()
    engine.start("only", 11)
    slot_bytes = {name: pool.view.slot_bytes for name, pool in engine.pools.items()}
    assert engine.canary.certificate()["live_bytes"] == 11 * sum(slot_bytes.values())
    engine.step()
    assert engine.canary.certificate()["live_bytes"] >= 11 * sum(slot_bytes.values())
    engine.finish("only")
    assert engine.canary.certificate()["live_bytes"] == 0


def test_the_automatic_rotation_reads_every_live_byte_again(make_engine):
    """With no budget named, no live byte waits longer than the rotation, and the steps are long enough to tell."""
    engine = make_engine(num_pages=700, num_steps=1, num_nodes=2)
    engine.start("long", 33)
    for _ in range(2 * ROTATION_STEPS):
        engine.step()
    certificate = engine.canary.certificate()
    assert ROTATION_STEPS // 4 < certificate["max_unread_steps"] <= ROTATION_STEPS
    assert certificate["bytes_checked"] >= certificate["live_bytes"] // 2


def test_a_budget_of_all_live_bytes_reads_them_every_step(make_engine):
    """The budget decides the wait: with one as large as the rows nothing waits longer than a step or two."""
    engine = make_engine(num_pages=700, budget=1 << 30)
    engine.start("only", 33)
    for _ in range(10):
        engine.step()
    assert engine.canary.certificate()["max_unread_steps"] <= 2


def test_full_content_reads_more_than_rolling(make_engine):
    """Re-reading every byte of every forward compares more bytes than a budget a step."""
    read = {}
    for content in ("rolling", "full"):
        engine = make_engine(content=content)
        traffic(engine)
        read[content] = engine.canary.certificate()["bytes_checked"]
    assert read["full"] > read["rolling"] > 0


def test_a_preempted_request_starts_anew(make_engine):
    """A request whose pages all went back computes its rows again on others, without a finding."""
    engine = make_engine(content="full")
    engine.start("only", 9)
    engine.step()
    row = engine.rows["only"]
    engine.canary.on_free("only", row.pages)
    engine.free_pages += row.pages
    row.pages, row.committed = [], 0
    engine._begin()
    end = len(row.tokens) - 1
    engine._reserve("only", end)
    engine._chain("prefill", "target", {"only": row.tokens[:end]}, {"only": 0})
    engine._chain("prefill", "draft", {"only": row.tokens[1:]}, {"only": 0})
    engine.canary.collect(engine.canary.end_step())
    row.committed = end
    engine.canary.commit("only", end)
    engine.step()
    engine.finish("only")
    assert engine.canary.findings == []


def test_one_seed_gives_one_seed_id(make_engine):
    """Two runs with one seed can be compared, and another seed shows."""
    ids = [make_engine(seed=seed).canary.certificate()["seed_id"] for seed in (0, 1)]
    assert ids[0] == ids[1]
    views = [pool.view for pool in make_engine().pools.values()]
    other = CanaryManager(CanaryConfig(seed=8), views).certificate()["seed_id"]
    assert other != ids[0]


def test_without_a_seed_each_manager_draws_its_own(make_engine):
    """The keys of two managers without a seed differ."""
    views = [pool.view for pool in make_engine().pools.values()]
    first, second = (CanaryManager(CanaryConfig(), views).certificate()["seed_id"] for _ in range(2))
    assert first != second


def test_an_unknown_pool_names_the_known_ones(make_engine):
    """A substep of a pool that was not given is refused with the names that were."""
    with pytest.raises(PlanError) as caught:
        make_engine().canary.forward("verify", 0, "traget")
    assert str(caught.value) == "pool must be one of target, draft, got 'traget'"


def test_an_unknown_kind_names_the_known_ones(make_engine):
    """A substep of a kind that does not exist is refused with those that do."""
    with pytest.raises(PlanError) as caught:
        make_engine().canary.forward("vrify", 0, "target")
    assert str(caught.value) == "kind must be one of prefill, decode, draft, verify, extend, got 'vrify'"


def test_the_row_of_a_twin_request_is_foreign(make_engine):
    """Two requests with equal tokens have equal chains; reading the other's pages is a fault all the same."""
    engine = make_engine()
    engine.start("one", 9)
    tokens = list(engine.rows["one"].tokens[:9])
    engine._token = iter([*tokens, engine.rows["one"].tokens[9]]).__next__
    engine.start("two", 9)
    del engine._token
    assert engine.rows["one"].tokens == engine.rows["two"].tokens
    engine._prefix = lambda name: [engine.slot("one", position) for position in range(engine.rows[name].committed)]
    with pytest.raises(KVCorruptionError) as caught:
        engine.step("two")
    finding = caught.value.findings[0]
    assert (finding.code, finding.slot, finding.reader) == ("R8", engine.slot("one", 0), "two")
    assert finding.found["owner"] == "one"


def test_a_moved_stale_record_stays_stale(make_engine):
    """Moving what was written under an earlier grant makes nothing current."""
    engine = make_engine(page_size=1, num_pages=64)
    engine.start("old", 5)
    old = engine.rows["old"].pages[2]
    engine.finish("old")
    canary = engine.canary
    canary.admit("new", [1, 2, 3])
    canary.on_alloc("new", [old, 60])
    engine.pools["target"].kv[:, 60] = engine.pools["target"].kv[:, old]
    canary.on_move("target", torch.tensor([old]), torch.tensor([60]))
    canary.drain()
    generation = int(canary.session.state.by_name["target"].records[60, 2]) >> 32
    assert generation != canary.session.ledger.generations[60]


@pytest.mark.parametrize(("mode", "error"), [("log", HookOrderError), ("raise", KVCorruptionError)])
def test_steps_that_nobody_collects_are_told_about(make_engine, mode, error):
    """An engine that never collects hears of it some steps later, and of what was found meanwhile."""
    engine = make_engine(mode=mode)
    engine.start("one", 9)
    engine.canary.session.state.by_name["target"].records[engine.slot("one", 3), 1] ^= 1
    engine.canary.collect = lambda flight: None
    for _ in range(MOST_UNCOLLECTED + 1):
        engine.decode()
        assert engine.canary.findings == []
    words = r"must wait for collect\(\): 17 steps have ended .* at most 16 may: .* also where no token of it leaves"
    with pytest.raises(error, match=words if mode == "log" else "R3"):
        engine.decode()
    assert {finding.code for finding in engine.canary.findings} >= {"R3"}


def test_the_last_collected_step_answers_for_those_before(make_engine):
    """A lagging engine may leave steps uncollected for a while, and goes on when it has collected one behind them."""
    engine = make_engine()
    engine.start("one", 9)
    collect, flights = engine.canary.collect, []
    engine.canary.collect = flights.append
    for _ in range(3):
        for _ in range(MOST_UNCOLLECTED):
            engine.decode()
        collect(flights[-1])
    engine.canary.drain()
    assert engine.canary.findings == []


def test_a_move_that_is_interrupted_leaves_a_canary_that_goes_on(make_engine):
    """Nothing was moved: records stay where they are, and the steps behind it are judged as ever."""
    engine = make_engine(content="full")
    engine.start("one", 9)
    slots = torch.tensor([engine.slot("one", position) for position in (2, 3)])
    with pytest.raises(ZeroDivisionError), engine.canary.move("target", slots, slots.flip(0)):
        _ = 1 / 0
    engine.step()
    engine.decode()
    engine.finish("one")
    engine.canary.drain()
    assert engine.canary.findings == []


def test_after_a_finding_the_neighbours_are_read_at_once(make_engine):
    """Damage has neighbours: a second one in the same request is found in the next step, not a rotation later."""
    engine = make_engine(mode="log", content="rolling", budget=1)
    engine.start("one", 40)
    engine.start("two", 40)
    for position in (12, 30):
        engine.pools["target"].bits(1, engine.slot("one", position), "K")[2] ^= 1 << 3
    engine.canary.session.checks.scrubber.reread_soon(["one"])
    engine.step()
    assert {finding.position for finding in engine.canary.findings} == {12, 30}


def test_a_finding_makes_the_canary_look_around(make_engine):
    """Whoever holds the page of a finding, or the page beside it, is read whole in the next step."""
    engine = make_engine(mode="log", content="rolling", budget=1)
    engine.start("one", 40)
    slot = engine.slot("one", 12)
    engine.canary.session.state.by_name["target"].records[slot, 1] ^= 1
    engine.pools["target"].bits(1, engine.slot("one", 30), "K")[2] ^= 1 << 3
    engine.step()
    assert [finding.code for finding in engine.canary.findings] == ["R3"]
    engine.step()
    assert [finding.code for finding in engine.canary.findings] == ["R3", "R9"]


@pytest.mark.parametrize("disable", [frozenset(), frozenset({"H1"})])
def test_tokens_that_no_forward_has_written_are_no_commit(make_engine, disable):
    """H1: entries become final, and no forward with hooks has written them; switched off, nothing is said."""
    engine = make_engine(mode="log", disable=disable)
    engine.start("one", 9)
    engine._begin()
    engine._reserve("one", 12)
    engine.canary.append("one", [1, 2, 3])
    engine.canary.commit("one", 12)
    engine.canary.collect(engine.canary.end_step())
    found = [(finding.code, finding.expected, finding.found) for finding in engine.canary.findings]
    assert found == ([] if disable else [("H1", {"entries": 12}, {"entries": 9})])


def test_a_pool_has_one_canary(make_engine):
    """H2: a second manager on the same memory is refused and leaves the first as it is; detached, there may be one."""
    engine = make_engine()
    views = [pool.view for pool in engine.pools.values()]
    with pytest.raises(HookOrderError, match="pool 'target' has a canary already, attached as 'target': detach"):
        CanaryManager(CanaryConfig(), views)
    engine.start("one", 9)
    engine.step()
    engine.canary.detach()
    CanaryManager(CanaryConfig(), views).arm()


def test_a_canary_is_not_attached_while_a_graph_is_captured(make_engine, monkeypatch):
    """It allocates: H2 with the remedy; nothing of it remains, so that it can be attached afterwards."""
    engine = make_engine()
    engine.canary.detach()
    views = [pool.view for pool in engine.pools.values()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(HookOrderError, match="attach it before a CUDA graph is captured"):
        CanaryManager(CanaryConfig(), views)
    monkeypatch.undo()
    CanaryManager(CanaryConfig(), views).detach()


def test_extras_of_a_pool_have_one_canary_too(make_engine):
    """Memory is claimed whole: a side buffer of another pool counts."""
    scales = torch.zeros(64, 2)
    k, v, other_k, other_v = (torch.zeros(64, 2, 4) for _ in range(4))
    first = CanaryManager(CanaryConfig(), [PoolView("a", [k], [v], 4, extras={"scales": [scales]})])
    with pytest.raises(HookOrderError, match="pool 'b' has a canary already, attached as 'a'"):
        CanaryManager(CanaryConfig(), [PoolView("b", [other_k], [other_v], 4, extras={"scales": [scales]})])
    first.detach()


def test_a_canary_is_armed_once_and_before_the_first_request(make_engine):
    """H2: a request of a canary that was never armed, and a second arm(), are refused."""
    view = PoolView("only", [torch.zeros(64, 2, 4)], [torch.zeros(64, 2, 4)], 4)
    canary = CanaryManager(CanaryConfig(), [view])
    with pytest.raises(HookOrderError, match="was never armed: call arm\\(\\) after warm-up"):
        canary.admit("r", [1, 2])
    canary.arm()
    with pytest.raises(HookOrderError, match="arm\\(\\) comes once"):
        canary.arm()


def test_nothing_is_checked_before_arm(make_engine):
    """Warm-up forwards pass through: whatever they name is given back as it is, and nothing is counted."""
    view = PoolView("only", [torch.zeros(64, 2, 4)], [torch.zeros(64, 2, 4)], 4)
    canary = CanaryManager(CanaryConfig(), [view])
    substep = canary.forward("decode", 0, "only")
    row, slots = torch.tensor([10**6]), torch.tensor([-5])
    read = ReadPlan(torch.tensor([0, 1]), row, ("nobody",), 1, torch.tensor([0]), 1)
    assert substep.open(read, WritePlan(slots, torch.tensor([1]), torch.tensor([0]))) == (row, slots)
    substep.store(0, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    substep.close()
    canary.collect(canary.end_step())
    assert canary.certificate()["forwards"] == 0


@pytest.mark.parametrize("content", ["rolling", "full"])
def test_pages_of_a_preempted_request_are_read_before_they_are_freed(make_engine, content):
    """Pages may be given back without the end of the request: no committed byte goes unread, and damage is found."""
    engine = make_engine(mode="log", content=content, budget=1)
    engine.start("one", 17)
    engine.step()
    slot = engine.slot("one", 3)
    engine.pools["target"].bits(2, slot, "K")[1] ^= 1 << 5
    engine.canary.on_free("one", engine.rows["one"].pages)
    engine.canary.drain()
    assert engine.canary.certificate()["freed_unread_bytes"] == 0
    assert [(finding.code, finding.slot) for finding in engine.canary.findings] == [("R9", slot)]


def test_full_content_comes_to_rows_that_nobody_steps(make_engine):
    """A request that waits is in no forward: the rotation reads it all the same."""
    engine = make_engine(content="full", num_pages=400)
    engine.start("idle", 17)
    engine.start("busy", 5)

    def go_on() -> None:
        for _ in range(ROTATION_STEPS + 8):
            engine.decode("busy")

    go_on()
    assert engine.canary.certificate()["max_unread_steps"] <= ROTATION_STEPS
    engine.pools["target"].bits(2, engine.slot("idle", 3), "K")[1] ^= 1 << 5
    with pytest.raises(KVCorruptionError):
        go_on()


def test_drain_counts_references_again(make_engine):
    """A row that was changed behind the ledger's back is told when the engine is idle."""
    engine = make_engine()
    engine.start("one", 9)
    engine.canary.drain()
    engine.canary.session.ledger.known(["one"])[0].pages.pop()
    with pytest.raises(PageReferenceError, match="must have a reference for each row that names it"):
        engine.canary.drain()


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_drain_compares_the_prefix_cache(make_engine, mode):
    """A tree that forgot a page which it has published is told when the engine is idle, in every mode."""
    engine = make_engine(mode=mode)
    engine.start("one", 9)
    pages = engine.rows["one"].pages[:2]
    engine.canary.on_share("one", pages)
    engine.canary.drain(cached=pages)
    engine.canary.drain()
    assert engine.canary.findings == []
    words = f"it does not name page {pages[1]} and holds it"
    if mode == "raise":
        with pytest.raises(PageReferenceError, match=words):
            engine.canary.drain(cached=pages[:1])
    else:
        engine.canary.drain(cached=pages[:1])
        [finding] = engine.canary.findings
        assert (finding.code, words in finding.sentence + str(finding.found)) == ("L1", True), finding
