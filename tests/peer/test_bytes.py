"""Which bytes are covered: of every layer, to the last slot of a page and of the pool."""

from __future__ import annotations

import pytest

from kvcanary import PlanError, PoolView
from toy_findings import bits, found, places, slot_of


@pytest.mark.parametrize(("layer", "part"), [(0, "K"), (0, "V"), (69, "K"), (69, "V")])
def test_the_last_of_many_layers_is_covered(make_engine, layer, part):
    """K and V of all of 70 layers are covered from their first bit to their last."""
    engine = make_engine(layers=70)
    engine.start("only", 6)
    row = bits(engine, layer, slot_of(engine, "only", 3), part)
    row[-1] ^= 1 << 30
    (finding,) = found(engine.decode)
    assert (finding.code, finding.position, finding.layers, finding.part) == ("R9", 3, (layer,), part)


@pytest.mark.parametrize("position", [15, 16])
def test_the_borders_of_a_page_are_covered(make_engine, position):
    """The last slot of a page and the first of the next are told apart, and named."""
    engine = make_engine(page_size=16, num_pages=16)
    engine.start("only", 20)
    slot = slot_of(engine, "only", position)
    bits(engine, 1, slot, "V")[0] ^= 1
    (finding,) = found(engine.decode)
    assert (finding.slot, finding.position, finding.offset) == (slot, position, position % 16)


def test_the_last_slot_of_the_pool_is_covered(make_engine):
    """Records and fingerprints reach as far as the pool does."""
    engine = make_engine(num_pages=4)
    engine.pages.free = [3]
    engine.start("only", 3)
    engine.decode()
    last = engine.shape.num_slots - 1
    assert slot_of(engine, "only", 3) == last
    bits(engine, 1, last, "V")[-1] ^= 1
    assert places(found(engine.finish, "only")) == [("R9", last, 3)]


@pytest.mark.parametrize("what", ["layers", "parts"])
def test_exchanged_sources_are_found(engine, what):
    """K of two layers, or K and V of one, exchanged: the same words in another order are another content."""
    slot = slot_of(engine, "first", 4)
    pairs = {"layers": ((0, "K"), (1, "K")), "parts": ((1, "K"), (1, "V"))}[what]
    one, other = (bits(engine, layer, slot, part) for layer, part in pairs)
    one[:], other[:] = other.clone(), one.clone()
    (finding,) = found(engine.decode, "first")
    assert (finding.code, finding.slot) == ("R9", slot)
    assert set(finding.layers) == {layer for layer, _ in pairs}


def test_content_write_never_compares_bytes(make_engine):
    """With nothing to compare no byte of the pool is read, a changed one is no finding, and the certificate says so."""
    engine = make_engine(content="write")
    engine.start("only", 6)
    bits(engine, 1, slot_of(engine, "only", 2))[0] ^= 1
    engine.decode()
    engine.finish("only")
    certificate = engine.canary.certificate()
    assert (certificate["findings"], certificate["bytes_checked"]) == ([], 0)
    assert "R9" in certificate["inactive_classes"]


def test_a_pool_without_layers_is_refused(make_engine):
    """A model none of whose layers uses this pool is a sentence at attach time, not an error of an index."""
    with pytest.raises(PlanError, match="pool 'full': k and v must have one tensor a layer, got 0 and 0"):
        PoolView("full", (), (), 4)
