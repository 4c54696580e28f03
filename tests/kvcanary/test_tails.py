"""Whole pages are read with masks: what nobody has written, and the null page, must be finite (R9's clause U1)."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from kvcanary import KVCorruptionError
from kvcanary.config import ROTATION_STEPS
from kvcanary.records.state import CanaryState
from kvcanary.scrub.rereads import Rereads
from kvcanary.scrub.scrubber import STRIDE
from kvcanary_kernels.content.finite import finite_check_torch
from kvcanary_kernels.content.poison import poison_fill_torch
from kvcanary_kernels.record.formats import formats_of

NAN = float("nan")
TYPES = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
STEPS = STRIDE + 1  # within which a null page of 16 slots is looked at


def put(engine, pool: str, slot: int, layer: int = 0, value: float = NAN) -> None:
    """One element of K, and nobody is told."""
    bits = engine.pools[pool].bits(layer, slot, "K", head=1)
    bits[3] = torch.tensor([value], dtype=engine.pools[pool].view.dtype).view(bits.dtype)[0]


def tail_of(engine, name: str, pool: str = "target") -> list[int]:
    """Slots of the row's last page behind what any forward has written."""
    row, size = engine.rows[name], engine.page_size
    request = engine.canary.session.ledger.request(name)
    length = request.final_len(engine.canary.session.state.by_name[pool].pool_id)
    page = row.pages[length // size]
    return list(range(page * size + length % size, (page + 1) * size))


def only_finding(engine, run):
    with pytest.raises(KVCorruptionError) as caught:
        run()
    [finding] = caught.value.findings
    assert (finding.code, finding.name) == ("R9", "content not finite")
    return finding


def decode(engine, steps: int = STEPS) -> None:
    for _ in range(steps):
        engine.decode()


@pytest.mark.parametrize("pool", ["target", "draft"])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_the_null_page_must_be_finite(make_engine, kv_fault, pool, value):
    """Padding stored what no working forward computes: found within as many steps as the page has slots."""
    engine = make_engine(page_size=16, layers=2)
    engine.start("one", 20)
    kv_fault(
        lambda: put(engine, pool, 5, value=value),
        lambda: decode(engine),
        "R9",
        name="content not finite",
        pool=pool,
        slot=5,
        page=0,
        layer=0,
        reader=None,
        expected={"elements": "finite"},
        found={"layers_not_finite": [0]},
        undeclared=True,
    )
    assert "head 1, dim 3" in engine.canary.findings[0].bytes_of[0].text
    assert engine.canary.findings[0].causes[0].family == "graphs"


@pytest.mark.parametrize("content", ["rolling", "full"])
def test_the_tail_of_a_last_page_must_be_finite(make_engine, content):
    """A stray write behind the end of a row: found when its last page is looked at, under `full` in the same step."""
    engine = make_engine(page_size=32, content=content)
    engine.start("other", 5)
    engine.start("one", 36)
    slot = tail_of(engine, "one")[-1]
    put(engine, "target", slot, layer=2)
    finding = only_finding(engine, engine.decode if content == "full" else lambda: decode(engine, STRIDE))
    assert (finding.pool, finding.slot, finding.layer, finding.reader) == ("target", slot, 2, "one")
    assert finding.position == 63
    assert [cause.family for cause in finding.causes][:1] == ["bits"]
    assert "finite when the page was granted" in finding.causes[0].evidence[0]


def test_each_new_last_page_is_looked_at_once(make_engine, monkeypatch):
    """What changed hands is read, not what was read before: one look a page and pool, beside the null page."""
    engine = make_engine(page_size=16, num_pages=64)
    engine.start("one", 3)
    tails, looked = engine.canary.session.checks.tails, []
    look = tails._check
    monkeypatch.setattr(
        tails,
        "_check",
        lambda *a, **k: (looked.extend((a[3], a[0].name, p) for p in a[2]().positions[:1]), look(*a, **k)),
    )
    decode(engine, 96)
    for pool in ("target", "draft"):
        positions = [int(position) for site, own, position in looked if (site, own) == (("sweep", 2), pool)]
        pages = [position // 16 for position in positions]
        assert pages == sorted({*pages})
        assert len(pages) >= 96 // STRIDE - 2
        assert len({position % 16 for position in positions}) == len(pages)  # early in some, late in others


def test_the_records_of_a_device_say_the_same_of_what_is_unwritten(make_engine):
    """Where the host does not wait to hear of it, slots that a forward has written have no answer."""
    engine = make_engine(page_size=16)
    engine.start("one", 20)
    decode(engine, 3)
    tails, pool = engine.canary.session.checks.tails, engine.canary.session.state.by_name["target"]
    slots = np.arange(16) + 16 * engine.rows["one"].pages[1]
    unwritten = slots[tails._unwritten(pool, slots, slots)]
    tails._is_host = False
    assert slots[tails._unwritten(pool, slots, slots)].tolist() == slots.tolist()
    tails._is_host, asked = True, []
    for layer in range(pool.view.num_layers):
        rows = pool.rows.gather_layer(layer, torch.from_numpy(slots))
        pool.rows.scatter_layer(layer, torch.from_numpy(slots), torch.full_like(rows, -1))
    looks, grants = Rereads(torch.device("cpu"), at_once=False), engine.canary.session.ledger.generations[slots // 16]
    for own in (grants, None):
        part = (slots, own, lambda mismatch: asked.append(mismatch.any(1).numpy()) or [])
        looks.check_finite(pool, [part])
        looks.send().violations()
    assert 0 < len(unwritten) < 16
    assert slots[asked[0]].tolist() == unwritten.tolist()
    assert asked[1].all()


@pytest.mark.parametrize("null_slots", [1, 16, 33, 64, 600])
@pytest.mark.parametrize("is_host", [True, False])
def test_a_null_page_is_read_within_as_many_steps_as_it_has_slots(make_engine, monkeypatch, is_host, null_slots):
    """And within a rotation: one part after another by a host, all at once by a device, which pays for each check."""
    engine = make_engine(page_size=16)
    tails, pool, looked = engine.canary.session.checks.tails, engine.canary.session.state.by_name["target"], []
    object.__setattr__(pool, "view", replace(pool.view, null_slots=null_slots))
    monkeypatch.setattr(tails, "_is_host", is_host)
    monkeypatch.setattr(tails, "_check", lambda own, slots, *rest: looked[-1].extend(slots.tolist()))
    within = max(1, min(null_slots, ROTATION_STEPS - STRIDE) // STRIDE)  # slices
    for number in range(7, 7 + 4 * within):
        looked.append([])
        tails._check_null_slots(pool, number * STRIDE, STRIDE, whole=False)
    for first in range(3 * within + 1):
        assert sorted(chain(*looked[first : first + within])) == [*range(null_slots)]
    most = max(len(slots) for slots in looked)
    assert most == (-(-null_slots // within) if is_host else null_slots)


def test_granted_pages_keep_the_names_that_they_were_told_with(make_engine, monkeypatch):
    """Slots and what plans call them stay side by side, whoever told of pages in between."""
    engine = make_engine(page_size=16)
    tails, pool, asked = engine.canary.session.checks.tails, engine.canary.session.state.by_name["target"], []
    generations = engine.canary.session.ledger.generations
    generations[:] = np.arange(len(generations))

    def unwritten(pool, slots, names):
        asked.append((slots.tolist(), names.tolist()))
        return slice(1, None)

    monkeypatch.setattr(tails, "_unwritten", unwritten)
    monkeypatch.setattr(tails, "_check", lambda *reported: asked.append((reported[1].tolist(), reported[-1].tolist())))
    tails.granted([pool], [3], None)
    tails.granted([pool], [5, 4], np.arange(1000, 1032))
    tails.reread(7, 8, None, set())
    page = [*range(48, 64)]
    slots, names = [*page, *range(80, 96), *range(64, 80)], [*page, *range(1000, 1032)]
    assert asked == [(slots, names), (slots[1:], [name // 16 for name in names[1:]])]


def test_pages_of_a_group_are_told_with_what_plans_call_their_slots(make_engine):
    """Where a slot map sends full pages there; else plans call them as pools do."""
    engine = make_engine(page_size=16)
    canary, tails = engine.canary, engine.canary.session.checks.tails
    canary.session.poisoner.granted([5], 1, [9])
    canary.session.poisoner.granted([6], 1)
    for pages, renamed in tails._granted.values():
        [(first, names)] = renamed
        assert (pages.tolist(), first, names.tolist()) == ([5, 6], 0, [*range(144, 160)])


@pytest.mark.parametrize("struck", ["granted", "null", "tail"])
def test_a_device_looks_once_a_pool_and_step(make_engine, monkeypatch, struck):
    """At what was granted, at the null page and at ends of rows; each finding has its own site."""
    engine = make_engine(page_size=16)
    engine.start("one", 20)
    checks, page, asked = engine.canary.session.checks, engine.free_pages[7], []
    tails, looks = checks.tails, Rereads(torch.device("cpu"), at_once=False)
    tails._rereads, tails._is_host = looks, False
    for pool in engine.canary.session.state.pools:
        object.__setattr__(pool, "host", None)
    look = looks.check_finite

    def counted(pool, parts):
        asked.append((pool.name, len(parts)))
        return look(pool, parts)

    monkeypatch.setattr(looks, "check_finite", counted)
    put(engine, "target", {"granted": page * 16 + 3, "null": 5, "tail": tail_of(engine, "one")[-1]}[struck])
    engine.canary.on_alloc("one", [page])
    assert tails.reread(16, 8, checks.scrubber.batch(), set()) == []
    [violation] = looks.send().violations()
    assert asked == [("target", 3), ("draft", 3)]
    assert violation.site == {"granted": ("grant", 0), "null": ("sweep", 3), "tail": ("sweep", 2)}[struck]
    assert tails.reread(17, 8, None, set()) == []
    assert looks.send() is None
    assert tails.reread(17, 8, checks.scrubber.batch(), set()) == []
    assert asked[2:] == [("target", 1), ("draft", 1)]  # the null page


@pytest.mark.parametrize("poison", ["finite", "off"])
def test_a_page_must_be_finite_when_it_is_granted(make_engine, poison):
    """No poison vouches for a page that was never used, or is not poisoned: it is looked at before it is written."""
    engine = make_engine(page_size=16, poison=poison)
    engine.start("one", 20)
    page = engine.free_pages[7]
    put(engine, "draft", page * 16 + 3)
    engine._begin()
    engine.canary.admit("two", [1, 2, 3])
    engine.canary.on_alloc("two", [page])
    finding = only_finding(engine, (lambda: engine.canary.collect(engine.canary.end_step())))
    assert (finding.pool, finding.slot, finding.site, finding.reader) == ("draft", page * 16 + 3, ("grant", 0), None)
    assert finding.causes[0].family == "uninitialised"
    assert "never used" in finding.causes[0].evidence[0]


@pytest.mark.parametrize("content", ["rolling", "full"])
@pytest.mark.parametrize("num_pages", [8, 128])  # more NaN than the intake keeps
def test_what_lay_in_a_page_before_its_grant_is_not_called_a_stray_write(make_engine, content, num_pages):
    """Behind the end of a row in a new page: whichever look speaks first, nobody has seen it finite."""
    engine = make_engine(page_size=16, content=content, num_pages=num_pages)
    for page in engine.free_pages:
        for offset in (11, 15):
            put(engine, "target", page * 16 + offset)
    with pytest.raises(KVCorruptionError) as caught:
        engine.start("two", 5 if num_pages == 8 else 16 * 100 + 5)
    for finding in caught.value.findings:
        assert finding.causes[0].family == "uninitialised"
        assert not any("finite when" in line for cause in finding.causes for line in cause.evidence)
    assert engine.canary.session.ledger.pages.finite_since(engine.rows["two"].pages[-1]) is None


def test_a_page_that_is_granted_again_was_not_seen_under_its_new_grant(make_engine):
    """What was looked at in an earlier life of the page proves nothing."""
    engine = make_engine(page_size=16, poison="off")
    engine.start("one", 5)
    pages, page = engine.canary.session.ledger.pages, engine.rows["one"].pages[0]
    assert pages.finite_since(page) == 1
    engine.finish("one")
    engine._begin()
    engine.canary.admit("two", [1, 2, 3])
    engine.canary.on_alloc("two", [page])
    assert pages.finite_since(page) is None
    engine.canary.collect(engine.canary.end_step())
    assert pages.finite_since(page) == 2


def test_poison_vouches_for_a_page_that_it_fills(make_engine):
    """It is finite, and compared bit for bit at the grant: P1 speaks, and nothing is read twice."""
    engine = make_engine(page_size=16)
    engine.start("one", 20)
    page = engine.rows["one"].pages[0]
    engine.finish("one")
    engine.canary.session.poisoner.fill(list(engine.canary.session.poisoner.waiting))
    tails = engine.canary.session.checks.tails
    put(engine, "target", page * 16 + 3)
    engine._begin()
    engine.canary.admit("two", [1, 2, 3])
    engine.canary.on_alloc("two", [page])
    assert not tails._granted
    with pytest.raises(KVCorruptionError) as caught:
        engine.canary.collect(engine.canary.end_step())
    assert caught.value.findings[0].code == "P1"


def test_nan_poison_leaves_nothing_behind(make_engine):
    """The debug mode zeroes a page when it is granted: tails stay finite."""
    engine = make_engine(page_size=4, poison="nan", content="full")
    for turn in range(6):
        engine.start(f"r{turn}", 6)
        engine.step()
        engine.finish(f"r{turn}")
        engine.canary.session.poisoner.fill(list(engine.canary.session.poisoner.waiting))
    assert engine.canary.findings == []


def test_a_request_that_ends_has_its_tail_looked_at(make_engine):
    """Before its pages are anybody else's; a finding replaces its finish reason."""
    engine = make_engine(page_size=16, mode="abort")
    engine.start("one", 20)
    engine.decode()
    put(engine, "target", tail_of(engine, "one")[-1])
    assert engine.canary.release("one") is False
    assert [finding.site for finding in engine.canary.findings] == [("release", 0)]


def test_what_a_forward_has_stored_is_not_asked(make_engine):
    """As bytes, what a forward stored is its own: branch slots and rejected nodes may be anything. N1 says it there."""
    engine = make_engine(page_size=16, content="full", topk=2, num_steps=3, num_nodes=6, disable=frozenset({"N1"}))
    engine.start("one", 20)
    values = engine._values
    engine._values = lambda shape: values(shape).masked_fill_(torch.rand(shape) < 0.1, NAN)
    for _ in range(6):
        engine.step()
    assert engine.canary.findings == []


@pytest.mark.parametrize("settings", [{"disable": frozenset({"R9"})}, {"content": "write"}], ids=["disabled", "write"])
def test_switched_off_nothing_is_looked_at(make_engine, settings):
    """R9 disabled, or contents not compared: neither the null page, nor a tail, nor a granted page is read."""
    engine = make_engine(page_size=16, **settings)
    put(engine, "target", 5)
    put(engine, "target", engine.free_pages[7] * 16 + 3)
    engine.start("one", 20)
    put(engine, "target", tail_of(engine, "one")[-1])
    engine.canary.admit("two", [1])
    engine.canary.on_alloc("two", [engine.free_pages[7]])
    for _ in range(STEPS):
        engine.decode("one")
    engine.canary.release("one")
    certificate = engine.canary.certificate()
    assert certificate["findings"] == []
    assert certificate["finite_bytes_checked"] == 0


def test_pages_of_one_slot_have_no_tail(make_engine):
    """Then only the null slot is looked at."""
    engine = make_engine(page_size=1)
    put(engine, "target", engine.free_pages[7])
    engine.start("one", 20)
    decode(engine, 2 * STRIDE)
    certificate = engine.canary.certificate()
    assert certificate["finite_bytes_checked"] == 2 * sum(pool.view.slot_bytes for pool in engine.pools.values())


def test_the_certificate_counts_what_was_looked_at(make_engine):
    """In bytes, apart from those whose fingerprints were compared."""
    engine = make_engine(page_size=16, content="full")
    engine.start("one", 20)
    engine.decode()  # looks at tails before the draft has been fed
    certificate = engine.canary.certificate()
    target, draft = (engine.pools[name].view.slot_bytes for name in ("target", "draft"))
    granted, null = 2 * 16 - 20, 2 * 16
    assert certificate["finite_bytes_checked"] == (granted + null) * (target + draft) + 11 * target + 12 * draft
    assert engine.canary.session.coverage.totals()["finite_bytes_checked"] == certificate["finite_bytes_checked"]


def test_abort_ends_the_request_whose_page_it_is(make_engine):
    """The others go on; the null page is nobody's, and told only."""
    engine = make_engine(page_size=16, mode="abort", content="full")
    engine.start("one", 20)
    engine.start("two", 20)
    put(engine, "target", 7)
    put(engine, "target", tail_of(engine, "two")[-1])
    engine._begin()
    assert engine.canary.collect(engine.canary.end_step()) == {"two"}
    assert {finding.page for finding in engine.canary.findings} == {0, engine.rows["two"].pages[1]}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_loop_finds_what_the_reference_finds(layout, make_fake_pool, dtype):
    """In every layout and type: one bad element anywhere in a row, and none after it is gone."""
    view = make_fake_pool(layout, layers=2, num_pages=6, page_size=4, dtype=dtype).view
    pool, slots = CanaryState([view], 3).pools[0], np.array([5, 9, 23])
    formats = np.array(formats_of(pool.rows), np.int64)
    poison_fill_torch(pool.rows, torch.from_numpy(slots))
    assert pool.loops.are_finite(pool.struct_at, slots, formats)
    for part in view.parts:
        for tensor in part.tensors:
            page, place = divmod(9, 4) if tensor.shape[0] == 6 else (9, None)
            row = tensor[page] if place is None else tensor[page].select(1 if view.layout == "HND" else 0, place)
            for number in (0, row.numel() - 1):
                at = np.unravel_index(number, row.shape)
                before, row[at] = row[at].clone(), NAN
                mismatch = torch.zeros(3, 2, dtype=torch.int64)
                finite_check_torch(pool.rows, torch.from_numpy(slots), mismatch=mismatch)
                assert mismatch.any(1).tolist() == [False, True, False]
                assert not pool.loops.are_finite(pool.struct_at, slots, formats)
                row[at] = before
    assert pool.loops.are_finite(pool.struct_at, slots, formats)
