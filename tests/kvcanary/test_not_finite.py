"""N1: what a forward stores must be finite; the first layer, request, position and step that were not are named."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fake_engine import FakeEngine
from kvcanary import KVCorruptionError
from static_rig import StaticRig, StaticRow

ANN, BOB = 1, 2


class Blow:
    """NaN in what one layer of one forward stores of one entry; from there on in all layers behind it."""

    def __init__(self, kind: str, layer: int, entry: int, value: float = torch.nan, through: bool = True) -> None:
        self.kind, self.layer, self.entry, self.value, self.through = kind, layer, entry, value, through
        self.planned: Any = None
        self.name = ""

    def change_write(self, kind: str, index: int, pool: str, plan: Any) -> Any:
        if kind == self.kind and self.planned is None:
            self.planned = plan
        return plan

    def change_store(self, kind: str, index: int, pool: str, layer: int, slots: Any, *values: Any) -> Any:
        if kind != self.kind or layer < self.layer or (layer > self.layer and not self.through):
            return slots, *values
        if layer == self.layer:  # in place: what is told is what is stored
            values[layer % len(values)][self.entry, 0, 3] = self.value
        else:  # attention has spread it over all that comes behind it
            values[0][self.entry :] = torch.nan
        return slots, *values


def struck(blow: Blow, **settings: Any) -> FakeEngine:
    engine = FakeEngine(**settings)
    engine.change_write, engine.change_store = blow.change_write, blow.change_store
    return engine


def served(engine: FakeEngine) -> None:
    """Two prompts, steps with drafts, and one without."""
    engine.start("a", 9)
    engine.start("b", 6)
    for _ in range(2):
        engine.step()
    engine.decode()


@pytest.mark.parametrize("layout", ["stacked", "nhd_paged"])
@pytest.mark.parametrize("kind", ["prefill", "decode", "verify", "draft", "extend"])
def test_each_phase_names_where_it_stored(kind: str, layout: str) -> None:
    """Phase, layer, position and request of the first, in the step that stored it; later layers are its evidence."""
    blow = Blow(kind, layer=0 if kind in ("draft", "extend") else 1, entry=0)
    engine = struck(blow, layout=layout, content="full")
    with pytest.raises(KVCorruptionError) as caught:
        served(engine)
    found = caught.value.findings[0]
    assert (found.code, found.site[0], found.layer) == ("N1", kind, blow.layer)
    assert (found.position, found.slot) == (int(blow.planned.positions[0]), int(blow.planned.slots[0]))
    assert found.writer == "a"
    assert found.reader is None
    assert found.causes[0].family == "numerics"
    assert found.expected == {"elements": "finite"}
    assert "NaN in " in found.found["elements"]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinity_is_told_by_name(value: float) -> None:
    """A type that overflows stores Inf: the report says which, and in which element."""
    blow = Blow("prefill", layer=1, entry=4, value=value, through=False)
    with pytest.raises(KVCorruptionError) as caught:
        struck(blow).start("a", 9)
    found = caught.value.findings[0]
    assert (found.code, found.position, found.layers) == ("N1", 4, (1,))
    sign = "-" if value < 0 else ""
    assert found.found["elements"] == f"{sign}Inf in 1 of 16 elements of V, the first in head 0, dim 3"


def test_in_a_hundred_of_a_hundred_the_eager_place_is_right() -> None:
    """Any layer and entry of prefills and verifies, of pools that store by the canary's loop and by the engine."""
    for seed in range(100):
        draw = random.Random(seed)
        kind, layer = draw.choice(("prefill", "verify")), draw.randrange(3)
        blow = Blow(kind, layer, entry=draw.randrange(6), through=draw.random() < 0.5)
        engine = struck(blow, seed=seed, content=("full", "rolling", "write")[seed % 3])
        with pytest.raises(KVCorruptionError) as caught:
            served(engine)
        found = caught.value.findings[0]
        where = found.code, found.site[0], found.layer, found.position, found.slot, found.writer
        planned = (int(numbers[blow.entry]) for numbers in (blow.planned.positions, blow.planned.slots))
        assert where == ("N1", kind, layer, *planned, "a"), seed


def test_it_can_be_left_out() -> None:
    """Disabled, nothing fires; and what is finite fires nothing where it is on."""
    struck(Blow("prefill", 1, 0), disable=frozenset({"N1"})).start("a", 9)
    engine = FakeEngine(content="full")
    engine.start("a", 9)
    engine.step()
    assert engine.canary.certificate()["fired"] == {}
    assert "N1" in engine.canary.certificate()["classes"]


@pytest.mark.parametrize("puts", [False, True])
@pytest.mark.parametrize("layer", range(StaticRig.LAYERS))
def test_a_captured_forward_names_what_it_stored(layer: int, puts: bool) -> None:
    """The same of forwards that judge themselves: code, entry and slot, whether copies or values are read; then no
    more of it.
    """
    rig = StaticRig()
    for uid, page in (ANN, 2), (BOB, 3):
        rig.grant(uid, page)
    values = rig.values

    def bad(own: int, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = values(own, tokens, positions)
        if own == layer:
            v[1, 1, 2] = torch.nan
        return k, v

    substep = rig.add("decode", puts=puts)
    batch = rig.batch([StaticRow(ANN, [8], [5]), StaticRow(BOB, [12], [6])])
    rig.values = bad
    [found] = rig.run(substep, batch).violations
    assert (found.code, found.row, found.entry, found.slot, found.uid) == ("N1", 1, 1, 12, BOB)
    rig.values = values
    batch = rig.batch([StaticRow(ANN, [8, 9], [7]), StaticRow(BOB, [12, 13], [8])])
    assert rig.run(substep, batch, step=2).violations == []


def test_padding_of_a_captured_forward_may_store_anything() -> None:
    """Rows behind the live ones store what a kernel left there: NaN in null slots is no finding."""
    rig = StaticRig()
    rig.grant(ANN, 2)
    values = rig.values

    def bad(own: int, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = values(own, tokens, positions)
        k[1:] = torch.nan
        return k, v

    rig.values = bad
    for puts in (False, True):
        substep = rig.add("decode", index=0, rows=4 + puts, puts=puts)
        assert rig.run(substep, rig.batch([StaticRow(ANN, [8], [5])]), step=1 + puts).violations == []
