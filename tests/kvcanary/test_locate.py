"""content=full names a changed word exactly, and refuses to guess where more than one changed."""

from __future__ import annotations

import random

import pytest
import torch

from kvcanary import KVCorruptionError

DTYPES = {"float32": 32, "float64": 64, "bfloat16": 16, "float16": 16}
LAYERS, HEADS, DIM = 3, 2, 8


def running(make_engine, dtype: str = "float32", seed: int = 0):
    """An engine with two requests, some steps into their drafting."""
    engine = make_engine(
        content="full",
        dtype=getattr(torch, dtype),
        layers=LAYERS,
        heads=HEADS,
        head_dim=DIM,
        draft_layers=2,
        seed=seed,
    )
    engine.start("first", 13)
    engine.start("second", 6, chunks=2)
    for _ in range(3):
        engine.step()
    return engine


def flip(row: torch.Tensor, dim: int, bit: int) -> None:
    """Flip one bit of one element, the sign bit included."""
    top = 8 * row.element_size() - 1
    row[dim] ^= 1 << bit if bit < top else -(1 << top)


def found(engine) -> list:
    """The findings that stop the next step."""
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    return caught.value.findings


def assert_flip_is_named(engine, pool: str, position: int, layer: int, part: str, head: int, dim: int, bit: int):
    """Flip, step, and compare the one finding with the place and with both values."""
    slot = engine.slot("first", position)
    row = engine.pools[pool].bits(layer, slot, part, head)
    digits, size = 2 * row.element_size(), row.element_size()
    mask = (1 << 8 * size) - 1
    old = int(row[dim]) & mask
    flip(row, dim, bit)
    (finding,) = found(engine)
    assert (finding.code, finding.pool, finding.slot, finding.position) == ("R9", pool, slot, position)
    assert (finding.layers, finding.part, finding.head, finding.dim) == ((layer,), part, head, dim)
    assert (finding.bit, finding.byte) == (bit, bit // 8)
    assert finding.expected["bits"] == f"0x{old:0{digits}x}"
    assert finding.found["bits"] == f"0x{old ^ 1 << bit:0{digits}x}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_one_flipped_bit_is_named(make_engine, dtype, seed):
    """Pool, slot, position, layer, part, head, dim, byte and bit are those that were flipped."""
    rng = random.Random(f"{dtype}:{seed}")
    engine = running(make_engine, dtype, seed)
    pool = rng.choice(["target", "draft"])
    position = rng.randrange(engine.rows["first"].committed)
    layer = rng.randrange(engine.pools[pool].view.num_layers)
    place = (rng.choice("KV"), rng.randrange(HEADS), rng.randrange(DIM), rng.randrange(DTYPES[dtype]))
    assert_flip_is_named(engine, pool, position, layer, *place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["K", "V"])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_the_sign_bit_is_named_at_the_ends_of_the_row(make_engine, dtype, part, layer):
    """The sign bit of the first element of K and of the last of V, in the first and the last layer."""
    head, dim = (0, 0) if part == "K" else (HEADS - 1, DIM - 1)
    assert_flip_is_named(running(make_engine, dtype), "target", 0, layer, part, head, dim, DTYPES[dtype] - 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_bit_is_named(make_engine, dtype):
    """There is no threshold: the last bit of a mantissa is a finding like any other."""
    assert_flip_is_named(running(make_engine, dtype), "target", 4, 1, "V", 1, 3, 0)


def test_the_value_is_named(make_engine):
    """The report gives the number that was there and the number that is there now."""
    engine = running(make_engine)
    slot = engine.slot("first", 4)
    value = float(engine.pools["target"].kv[2, slot, 0, 1, 6])
    flip(engine.pools["target"].bits(2, slot, "K", 1), 6, 31)
    (finding,) = found(engine)
    assert finding.expected["value"] == value
    assert finding.found["value"] == -value


def test_a_value_that_became_nan_is_named_as_text(make_engine):
    """A changed word that is no number any more is still named, as text that JSON can hold."""
    engine = running(make_engine)
    slot = engine.slot("first", 4)
    engine.pools["target"].kv[2, slot, 0, 1, 6] = float("nan")
    (finding,) = found(engine)
    assert (finding.layer, finding.part, finding.head, finding.dim) == (2, "K", 1, 6)
    assert finding.found["value"] == "nan"


def test_several_bits_of_one_element_are_named_without_a_bit(make_engine):
    """One word that changed in several bits is named to its first byte, not to a bit."""
    engine = running(make_engine)
    row = engine.pools["target"].bits(1, engine.slot("first", 4), "V")
    row[5] ^= 0b1011 << 8
    (finding,) = found(engine)
    assert (finding.layer, finding.part, finding.head, finding.dim) == (1, "V", 0, 5)
    assert (finding.byte, finding.bit) == (1, None)


@pytest.mark.parametrize("seed", range(8))
def test_two_changed_words_are_found_and_none_is_named(make_engine, seed):
    """Two words of a layer explain no single change: the layer is named, a word is not guessed."""
    rng = random.Random(seed)
    engine = running(make_engine, seed=seed)
    slot, layer = engine.slot("first", rng.randrange(9)), rng.randrange(LAYERS)
    places = rng.sample([(part, head, dim) for part in "KV" for head in range(HEADS) for dim in range(DIM)], 2)
    for part, head, dim in places:
        flip(engine.pools["target"].bits(layer, slot, part, head), dim, rng.randrange(32))
    (finding,) = found(engine)
    assert (finding.code, finding.slot, finding.layers) == ("R9", slot, (layer,))
    assert (finding.part, finding.head, finding.dim, finding.byte, finding.bit) == (None,) * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["K", "V"])
def test_two_flipped_top_bits_of_a_row_are_found(make_engine, dtype, part):
    """Two sign bits do not cancel, wherever the sum of the row overflows."""
    engine = running(make_engine, dtype)
    row = engine.pools["target"].bits(1, engine.slot("first", 4), part)
    flip(row, 1, DTYPES[dtype] - 1)
    flip(row, 6, DTYPES[dtype] - 1)
    (finding,) = found(engine)
    assert (finding.code, finding.layers, finding.bit) == ("R9", (1,), None)


def test_two_exchanged_elements_are_found(make_engine):
    """The sum of the words stays, their order does not: keys tell the places apart."""
    engine = running(make_engine)
    row = engine.pools["target"].bits(0, engine.slot("first", 4), "K")
    row[2], row[3] = row[3].clone(), row[2].clone()
    (finding,) = found(engine)
    assert (finding.code, finding.layers, finding.part) == ("R9", (0,), None)


@pytest.mark.parametrize("parts", ["K", "V", "KV"])
def test_a_zeroed_row_is_found(make_engine, parts):
    """Zeros are bytes like any other."""
    engine = running(make_engine)
    slot = engine.slot("first", 4)
    for part in parts:
        engine.pools["target"].kv[2, slot, "KV".index(part)] = 0
    (finding,) = found(engine)
    assert (finding.code, finding.slot, finding.layers, finding.part) == ("R9", slot, (2,), None)


def test_a_change_in_two_layers_names_both_and_no_word(make_engine):
    """A slot that changed in two layers is one finding with both of them."""
    engine = running(make_engine)
    slot = engine.slot("first", 4)
    for layer in (0, 2):
        flip(engine.pools["target"].bits(layer, slot, "V"), 3, 7)
    (finding,) = found(engine)
    assert (finding.layer, finding.layers, finding.part) == (0, (0, 2), None)


def test_a_row_of_another_slot_is_named_as_such(make_engine):
    """Bytes that were written for another slot are found, and a cause names where they come from."""
    engine = running(make_engine)
    slot, other = engine.slot("first", 4), engine.slot("second", 2)
    kv = engine.pools["target"].kv
    kv[1, slot] = kv[1, other]
    (finding,) = found(engine)
    assert (finding.code, finding.slot, finding.layers) == ("R9", slot, (1,))
    assert any(str(other) in cause.text for cause in finding.causes)


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_change_outside_the_rows_is_nobodys(make_engine, pool):
    """Bytes of free pages and of the null page are not read by anyone and not compared."""
    engine = running(make_engine)
    for slot in (0, engine.free_pages[0] * engine.page_size):
        flip(engine.pools[pool].bits(0, slot, "K"), 0, 5)
    engine.step()
    assert engine.canary.findings == []
