"""Pages of many readers, and pages whose bytes come from elsewhere."""

from __future__ import annotations

import pytest

from kvcanary.config import ROTATION_STEPS
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.bench.toy.forwards import ToyRow
from toy_findings import bits, found, places, slot_of


def cached(engine: ToyEngine, pool: str = "target") -> tuple[list[int], int]:
    """Tokens of a request that has ended, and the slot of one of its entries that the prefix cache keeps."""
    engine.start("ended", 9)
    tokens, slot = engine.rows["ended"].tokens, slot_of(engine, "ended", 5)
    engine.share("ended")
    engine.finish("ended")
    return tokens, slot


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_flip_in_an_idle_cached_page_is_found_in_turn(make_engine, pool):
    """What no request holds is read again within a rotation, in its own pool."""
    engine = make_engine(content="rolling")
    _, slot = cached(engine)
    bits(engine, 0, slot, pool=pool)[0] ^= 1
    (finding,) = found(
        lambda: [(engine.begin(), engine.canary.collect(engine.canary.end_step())) for _ in range(ROTATION_STEPS)]
    )
    assert (finding.code, finding.pool, finding.slot, finding.site[0]) == ("R9", pool, slot, "sweep")


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_flip_in_a_cached_page_is_found_by_its_hit(make_engine, pool):
    """A hit reads its pages whole, before the forward that computes behind them gives a token."""
    engine = make_engine(content="rolling")
    tokens, slot = cached(engine)
    bits(engine, 0, slot, pool=pool)[0] ^= 1
    engine.admit("hit", tokens[:9])
    assert engine.acquire("hit") == 2
    (finding,) = found(engine.prefill, {"hit": 9})
    assert (finding.code, finding.pool, finding.slot, finding.reader) == ("R9", pool, slot, "hit")


@pytest.mark.parametrize("event", ["share", "acquire"])
def test_a_look_between_two_steps_does_not_count_as_the_next_one(make_engine, event):
    """With a budget for all bytes the step after a publication, or after a hit, reads them again."""
    engine = make_engine(content="rolling", budget=1 << 30)
    engine.start("only", 9)
    engine.share("only")
    if event == "acquire":
        engine.admit("hit", engine.rows["only"].tokens[:9])
        engine.acquire("hit")
        engine.finish("only")
    slot = slot_of(engine, "only" if event == "share" else "hit", 5)
    bits(engine, 0, slot)[0] ^= 1
    engine.begin()
    (finding,) = found(lambda: engine.canary.collect(engine.canary.end_step()))
    assert (finding.code, finding.slot, finding.last_good_step) == ("R9", slot, 1)


@pytest.mark.parametrize("named", [{"salt": "weights 2"}, {"adapter": "lora"}], ids=str)
def test_equal_tokens_of_another_namespace_are_another_row(make_engine, named):
    """A cache that forgets what else K and V depend on is found where the row begins; its clean twin is not."""
    engine = make_engine()
    tokens, _ = cached(engine)
    engine.admit("same", tokens[:9])
    engine.acquire("same")
    engine.prefill({"same": 9})
    engine.rows["other"] = ToyRow(tokens[:9], 9)
    engine.canary.admit("other", tokens[:9], **named)
    engine.acquire("other")
    assert ("R5", slot_of(engine, "other", 0), 0) in places(found(engine.prefill, {"other": 9}))


def test_drafting_over_a_shared_prefix_is_watched(make_engine):
    """Two requests draft over the pages of one; what is damaged there is one finding that names both."""
    engine = make_engine()
    engine.start("first", 10)
    engine.fork_by_reference("first", "second")
    for _ in range(3):
        engine.draft()
    assert engine.canary.findings == []
    slot = slot_of(engine, "second", 5)
    assert slot == slot_of(engine, "first", 5)
    bits(engine, 1, slot)[0] ^= 1
    (finding,) = found(engine.draft)
    assert (finding.code, finding.slot, set(finding.readers)) == ("R9", slot, {"first", "second"})


def load(engine: ToyEngine, ends: str) -> list[int]:
    """A prefix of 8 entries comes from elsewhere, to a request of 9 tokens; how its load has ended so far."""
    engine.start("away", 9)
    old = engine.rows["away"]
    kept = {name: pool.kv[:, old.slots[:8]].clone() for name, pool in engine.pools.items()}
    engine.finish("away")
    engine.begin()
    engine.admit("back", old.tokens[:9])
    row, row.pages = engine.rows["back"], engine.pages.take(2, engine.num_steps)
    row.slots, row.committed = engine._slots_of(row.pages), 8
    engine.canary.on_alloc("back", row.pages, for_load=True)
    engine.canary.on_load_begin("back", row.pages)
    for name, pool in engine.pools.items():
        pool.kv[:, row.slots] = kept[name]
    if ends == "end":
        engine.canary.on_load_end("back", row.pages, 8)
        engine.canary.commit("back", 8)
    elif ends == "fail":
        engine.canary.on_load_fail("back", row.pages)
    return row.pages


def test_a_loaded_prefix_is_right(make_engine):
    """Bytes that were away are the request's row again, and are watched from then on."""
    engine = make_engine()
    load(engine, "end")
    engine.prefill({"back": 9})
    engine.draft()
    assert engine.canary.findings == []
    bits(engine, 1, slot_of(engine, "back", 3))[0] ^= 1
    assert places(found(engine.decode)) == [("R9", slot_of(engine, "back", 3), 3)]


@pytest.mark.parametrize("ends", ["not yet", "fail"])
def test_a_prefix_that_is_not_loaded_is_not_read(make_engine, ends):
    """Before its load has ended, and when it has failed, a page holds nothing for a forward, whatever lies there."""
    engine = make_engine()
    pages = load(engine, ends)
    assert {(finding.code, finding.page) for finding in found(engine.prefill, {"back": 9})} == {("R12", pages[0])}
