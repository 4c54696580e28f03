"""Poison: a page that belongs to nobody is filled with a pattern, and a write into it is found when it is granted."""

from __future__ import annotations

import pytest
import torch

from kvcanary.records.state import CanaryState
from kvcanary.scrub.poison import BATCH_SLOTS
from kvcanary_kernels.content.poison import poison_check_torch, poison_fill_torch


def engine_with_poison(make_engine, **settings):
    """A request has ended, its pages were poisoned; another one runs."""
    engine = make_engine(page_size=1, num_pages=128, **settings)
    engine.start("old", BATCH_SLOTS)
    engine.start("other", 4)
    pages = list(engine.rows["old"].pages)
    engine.finish("old")
    while engine.canary.session.poisoner.waiting:
        engine._begin()
        engine.canary.collect(engine.canary.end_step())
    assert engine.canary.session.poisoner.poisoned.issuperset(pages)
    return engine, pages


def grant(engine, pages: list[int]) -> None:
    """The next request is granted exactly these pages."""
    engine.canary.admit("new", [1, 2, 3])
    engine.canary.on_alloc("new", pages)
    engine.canary.collect(engine.canary.end_step())


@pytest.mark.parametrize("pattern", ["finite", "nan"])
@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_write_into_a_free_page_is_found_when_it_is_granted(make_engine, kv_fault, pool, pattern):
    """P1 names pool, slot and layer."""
    engine, pages = engine_with_poison(make_engine, poison=pattern)

    def write() -> None:
        engine.pools[pool].bits(0, pages[5], "V")[3] ^= 1 << 7

    kv_fault(write, lambda: grant(engine, pages), "P1", pool=pool, slot=pages[5], layer=0, reader=None)


@pytest.mark.parametrize("pattern", ["finite", "nan", "off"])
def test_untouched_pages_are_granted_without_a_word(make_engine, pattern):
    """The clean twin."""
    engine = engine_with_poison(make_engine, poison="finite")[0] if pattern == "finite" else make_engine(poison=pattern)
    grant(engine, engine.free_pages[:20])
    assert engine.canary.findings == []


def test_without_poison_such_a_write_is_not_seen(make_engine):
    """Switched off, P1 is not judged."""
    engine, pages = engine_with_poison(make_engine, disable=frozenset({"P1"}))
    engine.pools["target"].bits(0, pages[5], "V")[3] ^= 1 << 7
    grant(engine, pages)
    assert engine.canary.findings == []


def test_poison_is_finite_and_fills_every_byte(make_engine):
    """A late read of a freed page gives small numbers."""
    engine, pages = engine_with_poison(make_engine)
    rows = engine.pools["target"].kv[:, pages]
    assert torch.isfinite(rows).all()
    assert rows.abs().max() < 2
    assert (rows.view(torch.int32) != 0).all()


def test_nan_poison_is_zeroed_before_somebody_reads_it(make_engine):
    """A granted page has no NaN left in the part that is not written yet."""
    engine, pages = engine_with_poison(make_engine, poison="nan")
    assert engine.pools["target"].kv[:, pages].isnan().all()
    grant(engine, pages[:7])
    assert (engine.pools["target"].kv[:, pages[:7]] == 0).all()


def test_pages_reused_before_they_were_poisoned_are_counted(make_engine):
    """The budget was too small for them, and the certificate says so."""
    engine = make_engine(page_size=1, num_pages=128)
    engine.start("old", BATCH_SLOTS)
    pages = list(engine.rows["old"].pages)
    engine.finish("old")
    grant(engine, pages[:9])
    assert engine.canary.certificate()["unchecked"] == {"freed pages reused before they were poisoned": 9}


def test_the_budget_is_kept(make_engine, monkeypatch):
    """No more bytes are filled than the steps so far allow."""
    engine = make_engine(page_size=1, num_pages=512)
    engine.start("old", 4 * BATCH_SLOTS)
    poisoner = engine.canary.session.poisoner
    monkeypatch.setattr(poisoner, "budget", BATCH_SLOTS * poisoner._slot_bytes // 2)
    engine.finish("old")
    filled = []
    for _ in range(8):
        poisoner.tick()
        filled.append(len(poisoner.poisoned))
    assert filled == [0, 64, 64, 128, 128, 192, 192, 256]


def test_nothing_is_saved_of_steps_in_which_no_page_waits(make_engine, monkeypatch):
    """What a step has left of its budget goes to pages that wait on; once they were granted nobody has it."""
    engine = make_engine(page_size=1, num_pages=512)
    engine.start("old", 4 * BATCH_SLOTS)
    engine.start("other", 4)
    poisoner = engine.canary.session.poisoner
    monkeypatch.setattr(poisoner, "budget", BATCH_SLOTS * poisoner._slot_bytes // 2)
    engine.finish("old")
    engine.decode("other")
    assert poisoner.credit == poisoner.budget
    grant(engine, list(poisoner.waiting))
    assert (poisoner.credit, poisoner.poisoned) == (0, set())


def damaged_page(engine, name: str) -> int:
    """A page of the request, after a byte of it has changed."""
    page = engine.rows[name].pages[1]
    engine.pools["target"].bits(0, engine.slot(name, 5), "V")[3] ^= 1 << 7
    return page


@pytest.mark.parametrize("mode", ["abort", "log"])
def test_pages_of_a_damaged_request_are_filled_when_they_are_freed(make_engine, mode):
    """Whatever the budget is: all that it holds, and nothing of requests in which nothing was found."""
    engine = make_engine(page_size=4, num_pages=64, mode=mode, content="full")
    poisoner = engine.canary.session.poisoner
    poisoner.budget = 0
    engine.start("one", 12)
    engine.start("other", 12)
    page = damaged_page(engine, "one")
    engine.decode("one")
    pages, others = (list(engine.rows[name].pages) for name in ("one", "other"))
    for name in ("one", "other"):
        engine.finish(name)
    assert page in pages
    assert poisoner.poisoned == set(pages)
    assert list(poisoner.waiting) == others


def test_without_poison_they_are_zeroed(make_engine):
    """The next owner reads whole pages."""
    engine = make_engine(page_size=4, num_pages=64, mode="abort", content="full", poison="off")
    engine.start("one", 12)
    page = damaged_page(engine, "one")
    engine.decode()
    engine.finish("one")
    slots = slice(page * 4, page * 4 + 4)
    for pool in engine.pools.values():
        assert (pool.kv[:, slots] == 0).all()


def test_a_damaged_page_of_a_cache_is_filled_when_it_is_evicted(make_engine):
    """The last re-read at its bytes finds the damage; a clean one waits for the budget."""
    engine = make_engine(page_size=4, num_pages=64, mode="abort")
    poisoner = engine.canary.session.poisoner
    poisoner.budget = 0
    engine.start("one", 12)
    clean, page = engine.rows["one"].pages[:2]
    engine.canary.on_share("one", [clean, page])
    engine.finish("one")
    engine.pools["target"].bits(0, 4 * page, "V")[3] ^= 1 << 7
    before = set(poisoner.waiting)
    engine.canary.on_evict([clean])
    engine.canary.on_evict([page])
    assert poisoner.poisoned == {page}
    assert set(poisoner.waiting) - before == {clean}


@pytest.mark.parametrize("mode", ["abort", "log"])
def test_damage_of_an_evicted_page_is_not_its_next_owner_s(make_engine, mode):
    """Granted again in the same step: the finding names nobody, and abort ends nobody."""
    engine = make_engine(page_size=4, num_pages=64, mode=mode)
    engine.start("one", 12)
    page = engine.rows["one"].pages[0]
    engine.canary.on_share("one", [page])
    engine.finish("one")
    engine.pools["target"].bits(0, 4 * page, "V")[3] ^= 1 << 7
    engine.canary.on_evict([page])
    engine.canary.admit("new", [1, 2, 3])
    engine.canary.on_alloc("new", [page])
    assert engine.canary.collect(engine.canary.end_step()) == frozenset()
    [finding] = engine.canary.findings
    assert (finding.code, finding.page, finding.owner, finding.readers) == ("R9", page, None, ())
    assert not engine.canary.session.ledger.request("new").is_damaged


@pytest.mark.parametrize("nan", [False, True])
def test_the_loop_fills_and_reads_the_pattern_of_the_reference(layout, make_fake_pool, nan):
    """In every layout: what one fills the other finds whole, and both see every word that was changed."""
    view = make_fake_pool(layout, layers=3, num_pages=6, page_size=4).view
    pool, slots = CanaryState([view], 3).pools[0], torch.tensor([5, 9, 23])
    loop, mismatch = pool.loops.poison, torch.zeros(3, 2, dtype=torch.int64)
    assert not loop(pool.struct_at, slots.numpy(), nan, False)
    poison_fill_torch(pool.rows, slots, nan=nan)
    assert loop(pool.struct_at, slots.numpy(), nan, False)
    for layer in range(3):
        for word in range(pool.rows.words_per_row):
            rows = pool.rows.gather_layer(layer, slots)
            changed = rows.clone()
            changed[1, word] ^= 1 << word % 31
            pool.rows.scatter_layer(layer, slots, changed)
            assert not loop(pool.struct_at, slots.numpy(), nan, False)
            pool.rows.scatter_layer(layer, slots, rows)
    other = torch.tensor([7, 20, 6])
    assert loop(pool.struct_at, other.numpy(), nan, True)
    poison_check_torch(pool.rows, other, mismatch=mismatch, nan=nan)
    assert not mismatch.any()
