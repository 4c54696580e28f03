"""Whose bytes are these: known by name where they were written for another slot, else by hypotheses that are tested."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, KVCorruptionError, PoolView
from kvcanary.provenance.bytes_of import HYPOTHESES, SEARCHED_SLOTS, Provenance, find_provenance, fingerprints_of_rows
from kvcanary_kernels.content.poison import NAN_WORD, poison_words

LAYER = 1
Damage = Callable[[torch.Tensor, int, int], None]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def engine(request, make_engine):
    """Two requests in fp32 or bf16, one step into their drafting, every byte fingerprinted."""
    engine = make_engine(dtype=request.param, content="full")
    engine.start("first", 13)
    engine.start("second", 9)
    engine.step()
    engine.canary.drain()
    return engine


def answers_for(engine, damage: Damage, layer: int = LAYER, **settings) -> tuple[Provenance, ...]:
    """Damage position 5 of `first` with bytes of position 2 of `second`, and ask."""
    slot, other = engine.slot("first", 5), engine.slot("second", 2)
    damage(engine.pools["target"].kv, slot, other)
    return find_provenance(engine.canary.session.state.pools[0], slot, layer, **settings)


def words_of(kv: torch.Tensor, slot: int) -> torch.Tensor:
    """The row of a slot in LAYER as 32-bit words that can be written."""
    return kv[LAYER, slot].view(torch.int32)


def copy_row(kv, slot, other):
    kv[LAYER, slot] = kv[LAYER, other]


def copy_from_the_next_slot(kv, slot, other):
    kv[LAYER, slot] = kv[LAYER, slot + 1]


def zero_row(kv, slot, other):
    kv[LAYER, slot] = 0


def zero_v(kv, slot, other):
    kv[LAYER, slot, 1] = 0


def poison_row(kv, slot, other):
    words = kv[LAYER, slot].view(torch.int32).numel()
    words_of(kv, slot).view(-1)[:] = poison_words(torch.tensor([slot]), LAYER * words, words)[0]


def poison_k(kv, slot, other):
    words = words_of(kv, slot)
    words[0].view(-1)[:] = poison_words(torch.tensor([slot]), LAYER * words.numel(), words.numel() // 2)[0]


def nan_poison(kv, slot, other):
    words_of(kv, slot)[:] = NAN_WORD


def exchange_k_and_v(kv, slot, other):
    kv[LAYER, slot] = kv[LAYER, slot].flip(0).clone()


def store_k_as_v(kv, slot, other):
    kv[LAYER, slot, 1] = kv[LAYER, other, 0]


def store_v_as_k(kv, slot, other):
    kv[LAYER, slot, 0] = kv[LAYER, other, 1]


def own_k_as_v(kv, slot, other):
    kv[LAYER, slot, 1] = kv[LAYER, slot, 0]


def foreign_v(kv, slot, other):
    kv[LAYER, slot, 1] = kv[LAYER, other, 1]


def own_row_of_another_layer(kv, slot, other):
    kv[LAYER, slot] = kv[2, slot]


def foreign_row_of_another_layer(kv, slot, other):
    kv[LAYER, slot] = kv[2, other]


def slip_heads_around(kv, slot, other):
    kv[LAYER, slot] = kv[LAYER, slot].roll(1, 1)


def slip_elements_of_v(kv, slot, other):
    kv[LAYER, slot, 1] = kv[LAYER, slot, 1].view(-1).roll(-1).view(kv[LAYER, slot, 1].shape)


def slip_a_block_by_a_head(kv, slot, other):
    """K of all slots is one block of heads, which lies one head too far."""
    k = kv[LAYER, :, 0].flatten(0, 1)
    kv[LAYER, :, 0] = k.roll(1, 0).view(kv[LAYER, :, 0].shape)


def one_infinite_element(kv, slot, other):
    kv[LAYER, slot, 1, 1, 3:5] = float("inf")


EXPECTED = [
    (copy_row, "slot", "the bytes of slot {other}", "derived"),
    (copy_from_the_next_slot, "slot", "the bytes of slot {next}, the one after it", "derived"),
    (zero_row, "zero", "all zero", "inferred"),
    (zero_v, "zero_part", "V is all zero", "inferred"),
    (poison_row, "poison", "the poison of freed pages: nothing was stored since", "inferred"),
    (poison_k, "poison", "K is the poison of freed pages: it was not stored since", "inferred"),
    (nan_poison, "poison", "the poison of freed pages: nothing was stored since", "inferred"),
    (exchange_k_and_v, "exchange", "its own K and V, exchanged", "inferred"),
    (store_k_as_v, "part", "V is K of slot {other} stored as V", "inferred"),
    (store_v_as_k, "part", "K is V of slot {other} stored as K", "inferred"),
    (own_k_as_v, "part", "its K and V are the same: one was stored as the other", "inferred"),
    (foreign_v, "part", "V is V of slot {other}", "inferred"),
    (own_row_of_another_layer, "layer", "the row of layer 2, slot {slot}", "inferred"),
    (foreign_row_of_another_layer, "layer", "the row of layer 2, slot {other}", "inferred"),
    (slip_heads_around, "shift", "its own K and V, slipped by one head", "inferred"),
    (slip_elements_of_v, "shift", "its own V, slipped by one element", "inferred"),
    (slip_a_block_by_a_head, "shift", "its own K, slipped by one head", "inferred"),
    (one_infinite_element, "not_finite", "NaN or Inf in 2 elements of V, the first at V, head 1, dim 3", "inferred"),
]


@pytest.mark.parametrize(("damage", "kind", "text", "basis"), EXPECTED, ids=[case[0].__name__ for case in EXPECTED])
def test_the_bytes_are_known_again(engine, damage, kind, text, basis):
    """What a fault left in a row is recognised, and told apart from what was only guessed."""
    first, *_ = answers_for(engine, damage)
    slot, other = engine.slot("first", 5), engine.slot("second", 2)
    assert (first.kind, first.basis) == (kind, basis)
    assert first.text == text.format(slot=slot, other=other, next=slot + 1)


def test_every_hypothesis_is_asked():
    """Each function of the list has a case of its own above, or its own test below."""
    shown = {"of_another_slot", "all_zero", "poisoned", "exchanged", "part_of_a_slot", "slipped", "not_finite"}
    shown |= {"scales_in_another_order", "of_another_layer", "scales_of_another"}
    assert {hypothesis.__name__ for hypothesis in HYPOTHESES} == shown


def test_several_slots_of_one_name_are_counted(engine):
    """Where many slots were written with these bytes, a few are named and the others counted."""
    state = engine.canary.session.state.pools[0]
    slot = engine.slot("first", 5)
    name = int(state.content_a[LAYER, slot])
    state.content_a[LAYER, 300:307] = name
    (answer,) = find_provenance(state, slot, LAYER)
    assert answer.text == "the bytes of slot 300, 301, 302, 303 and 3 more"


def test_what_nobody_knows_has_no_answer(engine):
    """Bytes that fit nothing are not explained."""

    def scramble(kv, slot, other):
        kv[LAYER, slot] += 1

    assert answers_for(engine, scramble) == ()


@pytest.mark.parametrize("part", [0, 1], ids="KV")
def test_a_twin_is_not_blamed(engine, part):
    """K and V of the same token may be the same elsewhere by right: they explain nothing."""
    slot, twin = engine.slot("first", 5), engine.slot("second", 2)
    state, kv = engine.canary.session.state.pools[0], engine.pools["target"].kv
    state.records[twin] = state.records[slot]
    kv[LAYER, twin] = kv[LAYER, slot]
    kv[LAYER, slot, part] += 1
    assert find_provenance(state, slot, LAYER) == ()


def test_right_bytes_have_no_answer(engine):
    """A row that nobody touched is nobody else's."""
    assert answers_for(engine, lambda kv, slot, other: None) == ()


def test_the_search_is_bounded(make_engine):
    """Hypotheses look at no more slots than stated; those of the reader's row come first."""
    engine = make_engine(num_pages=2100)
    engine.start("first", 9)
    engine.canary.drain()
    state = engine.canary.session.state.pools[0]
    kv = engine.pools["target"].kv
    kv[LAYER] = torch.randn_like(kv[LAYER])
    slot, far = 100, 8000
    kv[LAYER, slot, 1] = kv[LAYER, far, 0]
    assert far - slot > SEARCHED_SLOTS
    assert find_provenance(state, slot, LAYER) == ()
    kv[LAYER, slot + 1, 0] = kv[LAYER, far, 0]
    assert find_provenance(state, slot, LAYER, first=range(3000, 3000 + SEARCHED_SLOTS)) == ()
    (answer,) = find_provenance(state, slot, LAYER, first=[far])
    assert answer.text == f"V is K of slot {far} stored as V"


def test_a_finding_says_whose_bytes_it_found(make_engine):
    """A row that changed in several words is looked up; the finding and its report have the answer."""
    engine = make_engine(content="full")
    engine.start("first", 13)
    engine.step()
    slot, other = engine.slot("first", 5), engine.slot("first", 9)
    store_k_as_v(engine.pools["target"].kv, slot, other)
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    (finding,) = caught.value.findings
    assert finding.bytes_of == (Provenance("part", f"V is K of slot {other} stored as V", "inferred", other, LAYER),)
    assert f"  bytes     V is K of slot {other} stored as V (inferred)\n" in str(caught.value)


def test_nothing_is_looked_up_where_one_word_explains_all(make_engine, monkeypatch):
    """A flipped bit is its own explanation."""
    monkeypatch.setattr(
        "kvcanary.report.ledger_evidence.find_provenance", lambda *_, **__: pytest.fail("nobody should ask")
    )
    engine = make_engine(content="full")
    engine.start("first", 13)
    engine.step()
    engine.pools["target"].bits(LAYER, engine.slot("first", 5), "V")[3] ^= 1
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert caught.value.findings[0].bytes_of == ()


@pytest.mark.parametrize(
    ("scales", "texts"),
    [
        ([1.0, 2.0, 3.0, 4.0], []),
        ([1.5, 1.5, 1.5, 1.5], ["k_scale and v_scale hold one number throughout"]),
        ([0.6, 0.7, 0.8, 0.9], ["k_scale and v_scale are those of slot 5"]),
    ],
)
def test_scales_are_looked_at(scales, texts):
    """What lies beside K and V was reset, or is the neighbour's; scales of their own say nothing."""
    values = torch.arange(2 * 16 * 2 * 8, dtype=torch.int8).view(2, 1, 16, 2, 8)
    beside = torch.rand(2, 1, 16, 2, generator=torch.Generator().manual_seed(1))
    beside[:, 0, 5] = torch.tensor([0.6, 0.7, 0.8, 0.9]).view(2, 2)
    beside[:, 0, 6] = torch.tensor(scales).view(2, 2)
    extras = {"k_scale": list(beside[0]), "v_scale": list(beside[1])}
    manager = CanaryManager(CanaryConfig(), [PoolView("quantised", list(values[0]), list(values[1]), 4, extras=extras)])
    answers = find_provenance(manager.session.state.pools[0], slot=6, layer=0)
    assert [answer.text for answer in answers if answer.kind == "scale"] == texts


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda k, v: (v.clone(), k.clone()), "its own k_scale and v_scale, exchanged"),
        (lambda k, v: (k, v.flatten().flip(0).view(v.shape)), "its own v_scale, in another order"),
        (lambda k, v: (k, v.flatten().view(4, 2).T.reshape(v.shape)), "its own v_scale, in another order"),
        (lambda k, v: (k.flatten().roll(3).view(k.shape), v), "its own k_scale, in another order"),
        (lambda k, v: (k, v + 1), None),
    ],
    ids=["exchanged", "reversed", "transposed", "rotated", "other numbers"],
)
def test_scales_in_another_order_name_their_part(damage, text):
    """All that changed lies beside K and V: which part it is, and that its numbers are its own."""
    values = torch.arange(2 * 16 * 2 * 8, dtype=torch.int8).view(2, 1, 16, 2, 8)
    beside = torch.rand(2, 1, 16, 2, 4, generator=torch.Generator().manual_seed(1))
    extras = {"k_scale": list(beside[0]), "v_scale": list(beside[1])}
    manager = CanaryManager(CanaryConfig(), [PoolView("quantised", list(values[0]), list(values[1]), 4, extras=extras)])
    (pool,) = manager.session.state.pools
    pool.content_a[0, 6] = fingerprints_of_rows(pool, 0, pool.rows.gather_layer(0, torch.tensor([6])))[0]
    beside[0, 0, 6], beside[1, 0, 6] = damage(*beside[:, 0, 6].clone())
    texts = [answer.text for answer in find_provenance(pool, slot=6, layer=0) if answer.kind == "scale_order"]
    assert texts == ([] if text is None else [text])
