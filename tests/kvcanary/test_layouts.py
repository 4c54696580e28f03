"""Every pool layout through the whole canary: one content has one record; a flipped bit is found, named, repaired."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvcanary import KVCorruptionError, PlanError, ReadPlan, WritePlan
from kvcanary.calls.entries import Entries
from kvcanary.checks.content import find_changed
from kvcanary.provenance.changed_word import locate_word
from kvcanary.records.fingerprints import fingerprints_of_layer, fingerprints_of_slots, slots_are_right
from kvcanary.records.state import CanaryState
from kvcanary.scrub.repair import repair_slot
from kvcanary_kernels.content.fingerprint import fingerprint_torch
from kvcanary_kernels.record.layout import signed

pytestmark = pytest.mark.usefixtures("early_slices")
SLOW = pytest.mark.slow
DTYPES = ["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float16", "float32", "float64"]
FEW_DTYPES = [dtype if dtype in ("float8_e4m3fn", "float64") else pytest.param(dtype, marks=SLOW) for dtype in DTYPES]
K_AND_V = ["nhd", "nhd_fused", "nhd_paged", "hnd", "hnd_fused", "hnd_sides"]


def flip(row: torch.Tensor, dim: int, bit: int) -> None:
    """Flip one bit of one element, the sign bit included."""
    top = 8 * row.element_size() - 1
    row[dim] ^= 1 << bit if bit < top or row.dtype is torch.uint8 else -(1 << top)


def traffic(engine) -> None:
    """Two requests: chunked prefill, drafting with moves, plain decode."""
    engine.start("first", 13, chunks=2)
    engine.start("second", 6)
    for _ in range(3):
        engine.step()
    engine.decode()
    engine.step()


# one content, one record


def sealed_by(make_engine, layout: str, **settings: object) -> list[torch.Tensor]:
    """Records and fingerprints of both pools after the same traffic."""
    engine = make_engine(layout=layout, content="full", **settings)
    traffic(engine)
    engine.canary.drain()
    return [tensor for pool in engine.canary.session.state.pools for tensor in (pool.records, pool.content_a)]


@pytest.mark.parametrize("layout", K_AND_V)
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=SLOW), 4])
def test_the_same_content_has_the_same_records_in_every_layout(make_engine, layout, page_size):
    """What an engine stores is fingerprinted in logical order: records and fingerprints are those of a stacked pool."""
    settings = {"dtype": torch.bfloat16, "page_size": page_size, "num_pages": 400 // page_size}
    expected = sealed_by(make_engine, "stacked", **settings)
    found = sealed_by(make_engine, layout, **settings)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_stored_values_have_the_fingerprints_of_the_slots(make_engine, layout, dtype):
    """Fingerprints of values on their way into the pool are those of the bytes that lie in it, also of long
    forwards.
    """
    engine = make_engine(layout=layout, dtype=getattr(torch, dtype), content="full", num_pages=256)
    engine.start("long", 300)
    engine.start("short", 9)
    engine.canary.drain()
    slots = torch.tensor([engine.slot("long", p) for p in range(300)] + [engine.slot("short", p) for p in range(9)])
    for pool in engine.canary.session.state.pools:
        fingerprint_a, fingerprint_b = fingerprints_of_slots(pool, slots)
        assert torch.equal(fingerprint_a, pool.content_a[:, slots])
        assert torch.equal(fingerprint_b, pool.records[slots, 4])
        assert slots_are_right(pool, slots)


def test_rows_of_all_layers_and_of_each_have_one_sum(layout, make_fake_pool):
    """The compiled loop over slots gives the fingerprints of the torch reference, and those of one layer after the
    other.
    """
    fake = make_fake_pool(layout, layers=3)
    fake.fill(torch.Generator().manual_seed(1))
    pool = CanaryState([fake.view], 5).pools[0]
    slots = torch.tensor([11, 4, 7])
    fingerprint_a, fingerprint_b = fingerprints_of_slots(pool, slots)
    expected = torch.empty_like(fingerprint_a), torch.empty_like(fingerprint_b)
    fingerprint_torch(pool.rows, slots, pool.keys, fingerprint_a=expected[0], fingerprint_b=expected[1])
    assert torch.equal(fingerprint_a, expected[0])
    assert torch.equal(fingerprint_b, expected[1])
    single = [fingerprints_of_layer(pool, layer, pool.rows.gather_layer(layer, slots)) for layer in range(3)]
    assert torch.equal(fingerprint_a, torch.stack([a for a, _ in single]))
    assert torch.equal(fingerprint_b, sum(b for _, b in single) + signed(pool.keys.start_b))


# one flipped bit


def places_in(fake, rng: random.Random) -> list[tuple[str, int, int, int]]:
    """(part, head, dim, bit): of every part the first and the last element, and one between, each with any bit."""
    found = []
    for part in fake.view.parts:
        bits = 8 * part.element_size
        found.append((part.name, 0, 0, bits - 1))
        found.append((part.name, part.heads - 1, part.dim - 1, 0))
        found.append((part.name, rng.randrange(part.heads), rng.randrange(part.dim), rng.randrange(bits)))
    return found


def assert_named_and_repaired(fake, pool, slot: int, layer: int, place: tuple[str, int, int, int]) -> None:
    part, head, dim, bit = place
    row = fake.bits(layer, slot, part, head)
    before = row.clone()
    flip(row, dim, bit)
    first, end = pool.view.null_slots, pool.view.num_slots
    seen = sorted({first, *range(max(first, slot - 2), min(end, slot + 3)), end - 1})
    nobody = np.full(len(seen), -1)
    entries = Entries(np.array(seen), nobody, nobody, ())
    batches = find_changed(pool, np.array(seen), lambda: entries, ("sweep", 0), 1, both_fingerprints=True)
    (violation,) = [batch.violation(number) for batch in batches for number in range(len(batch))]
    assert (violation.code, violation.slot, violation.layers) == ("R9", slot, (layer,))
    word = locate_word(pool, slot, layer)
    assert (word.part, word.head, word.dim, word.byte, word.bit) == (part, head, dim, bit // 8, bit)
    mask = (1 << 8 * row.element_size()) - 1
    assert (word.old, word.new, word.size) == (int(before[dim]) & mask, int(row[dim]) & mask, row.element_size())
    assert str(repair_slot(pool, slot).word) == str(word)  # NaN is not NaN
    assert torch.equal(row, before)


@pytest.mark.parametrize(
    ("dtype", "page_size"),
    [
        *((dtype, 16) for dtype in ("float8_e4m3fn", "bfloat16", "float32", "float64")),
        *((dtype, page_size) for dtype in ("float8_e4m3fn", "bfloat16") for page_size in (1, 512)),
        *(pytest.param(dtype, page_size, marks=SLOW) for dtype in ("float32", "float64") for page_size in (1, 512)),
    ],
)
def test_one_flipped_bit_is_found_named_and_repaired(layout, dtype, page_size, make_fake_pool, seal_pool):
    """In every layout, element size and page size; first and last slot, layer, part, head and dim; whole bytes back."""
    fake = make_fake_pool(
        layout, page_size=page_size, num_pages=2 if page_size > 1 else 20, dtype=getattr(torch, dtype)
    )
    rng = random.Random(f"{layout}:{dtype}:{page_size}")
    fake.fill(torch.Generator().manual_seed(rng.randrange(1000)))
    pool = CanaryState([fake.view], 3).pools[0]
    seal_pool(pool)
    original = pool.rows.gather(torch.arange(fake.view.num_slots))
    first, last = fake.view.null_slots, fake.view.num_slots - 1
    for number, place in enumerate(places_in(fake, rng)):
        slot = (first, last, rng.randrange(first, last + 1))[number % 3]
        assert_named_and_repaired(fake, pool, slot, number % 2, place)
    assert torch.equal(pool.rows.gather(torch.arange(fake.view.num_slots)), original)


@SLOW
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_every_element_of_a_row_is_named_and_repaired(layout, dtype, page_size, make_fake_pool, seal_pool):
    """All parts, heads and dims of a layer, each with a bit of its own."""
    fake = make_fake_pool(layout, page_size=page_size, num_pages=4, heads=3, dtype=getattr(torch, dtype))
    rng = random.Random(f"{layout}:{dtype}:{page_size}")
    fake.fill(torch.Generator().manual_seed(7))
    pool = CanaryState([fake.view], 3).pools[0]
    seal_pool(pool)
    for part in fake.view.parts:
        for head in range(part.heads):
            for dim in range(part.dim):
                place = part.name, head, dim, rng.randrange(8 * part.element_size)
                slot = rng.randrange(fake.view.null_slots, fake.view.num_slots)
                assert_named_and_repaired(fake, pool, slot, rng.randrange(2), place)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float16", "float64"])
def test_the_numbers_are_named(dtype, make_fake_pool, seal_pool):
    """Old and new bits are given as the numbers that they mean in the type of the part."""
    fake = make_fake_pool("hnd_fused", dtype=getattr(torch, dtype))
    fake.view.k[0][1, 1, 2, 3] = 3
    pool = CanaryState([fake.view], 3).pools[0]
    seal_pool(pool)
    fake.view.k[0][1, 1, 2, 3] = -2
    word = locate_word(pool, 6, 0)
    assert (word.part, word.head, word.dim) == ("K", 1, 3)
    assert (word.old_value, word.new_value) == (3.0, -2.0)


def test_two_changed_words_of_different_parts_are_refused_a_name(layout, make_fake_pool, seal_pool):
    """One word of the first part and one of the last: found, not guessed."""
    fake = make_fake_pool(layout)
    fake.fill(torch.Generator().manual_seed(5))
    pool = CanaryState([fake.view], 3).pools[0]
    seal_pool(pool)
    flip(fake.bits(1, 9, fake.view.parts[0].name), 0, 3)
    last = fake.view.parts[-1]
    flip(fake.bits(1, 9, last.name, last.heads - 1), last.dim - 1, 3)
    assert not slots_are_right(pool, torch.tensor([9]))
    assert locate_word(pool, 9, 1) is None


# the manager, end to end


@pytest.mark.parametrize("content", ["full", pytest.param("rolling", marks=SLOW)])
def test_right_traffic_has_no_finding(make_engine, layout, content):
    """Prefill, drafting, moves, decode and release of a right engine are clean in every layout."""
    engine = make_engine(layout=layout, dtype=torch.float8_e4m3fn, content=content)
    traffic(engine)
    for name in list(engine.rows):
        engine.finish(name)
    assert engine.canary.findings == []
    certificate = engine.canary.certificate()
    assert certificate["freed_unread_bytes"] == 0
    assert certificate["bytes_checked"] > 0


@pytest.mark.parametrize(("pool", "number"), [("target", -1), ("draft", 0)])
def test_a_flipped_bit_stops_the_manager_and_is_named(make_engine, layout, pool, number):
    """In the first and in the last part: pool, slot, position and every place down to the bit are those flipped."""
    engine = make_engine(layout=layout, dtype=torch.float64, content="full", draft_layers=2)
    traffic(engine)
    view = engine.pools[pool].view
    part = view.parts[number]
    slot, layer, head, dim = engine.slot("first", 5), view.num_layers - 1, part.heads - 1, part.dim - 1
    flip(engine.pools[pool].bits(layer, slot, part.name, head), dim, 9)
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    (finding,) = caught.value.findings
    assert (finding.code, finding.pool, finding.slot, finding.position) == ("R9", pool, slot, 5)
    assert (finding.layers, finding.part, finding.head, finding.dim) == ((layer,), part.name, head, dim)
    assert (finding.byte, finding.bit) == (1, 9)
    assert f"{part.name}, head {head}, dim {dim}" in str(caught.value)
    assert len(finding.expected["bits"]) == 2 + 2 * part.element_size


def test_a_store_that_went_elsewhere_is_found(make_engine, layout):
    """Values that one layer wrote into another slot are not what the record says lies there."""
    engine = make_engine(layout=layout, content="full")
    traffic(engine)
    engine.change_store = lambda kind, index, pool, layer, slots, *values: (
        slots.roll(1) if (kind, layer) == ("verify", 1) else slots,
        *values,
    )
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert {(finding.code, finding.layers) for finding in caught.value.findings} == {("R9", (1,))}


@pytest.mark.parametrize("prompt_len", [9, 300])
@pytest.mark.parametrize("disable", [frozenset(), frozenset({"R12"})], ids=["R12", "none"])
def test_a_layer_that_stored_nothing_is_r12_alone(make_engine, layout, prompt_len, disable):
    """What a layer did not store is taken as it lies in the pool, in short forwards and in long ones."""
    engine = make_engine(layout=layout, content="full", num_pages=256, disable=disable)
    engine.pools["target"].fill(torch.Generator().manual_seed(2), most=0x3F)
    engine.change_store = lambda kind, index, pool, layer, slots, *values: (
        None if (kind, pool, layer) == ("prefill", "target", 1) else (slots, *values)
    )
    if disable:
        engine.start("only", prompt_len)
        engine.finish("only")
        return
    with pytest.raises(KVCorruptionError) as caught:
        engine.start("only", prompt_len)
    assert {finding.code for finding in caught.value.findings} == {"R12"}


@pytest.mark.parametrize(
    ("layout", "given", "words"),
    [
        ("nhd", [(3, 2, 8)], "[3, 2, 8] a layer, got k [3, 2, 8]"),
        (
            "nhd",
            [(3, 2, 8), (3, 2, 8), (3, 2)],
            "[3, 2, 8] a layer, got k [3, 2, 8] and v [3, 2, 8] and another [3, 2]",
        ),
        ("latent", [(3, 8)], "[3, 1, 8] a layer, got k [3, 8]"),
        (
            "hnd_scales",
            [(3, 2, 8), (3, 2, 8), (3, 2)],
            "[3, 2, 8] and [3, 2] a layer, got k [3, 2, 8] and v [3, 2, 8] and k_scale [3, 2]",
        ),
    ],
)
def test_values_that_are_not_the_parts_of_the_row_are_refused(make_engine, layout, given, words):
    """A store gives every part, each in its own shape; what is missing is not taken as zero."""
    engine, three = make_engine(layout=layout, heads=2, head_dim=8), torch.arange(3)
    engine.canary.begin_step(1)
    engine.canary.admit("only", [1, 2, 3])
    engine.canary.on_alloc("only", [1])
    substep = engine.canary.forward("prefill", 0, "target")
    read = ReadPlan(torch.tensor([0, 3]), three + 4, ("only",), 1, torch.tensor([0]), 3)
    substep.open(read, WritePlan(three + 4, three + 1, three))
    with pytest.raises(PlanError) as caught:
        substep.store(0, *(torch.zeros(shape) for shape in given))
    assert str(caught.value) == f"prefill of the target pool stores {words}"
