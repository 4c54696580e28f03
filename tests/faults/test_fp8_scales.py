"""Scales of a running engine's 8-bit pools are protected bytes: what befalls one is found at its place.

Rooms of the scales family: quantised caches in which K's scale was applied to V, or scales stayed behind when their
tokens moved, gave fluent garbage for weeks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcanary import CanaryConfig, Finding, KVCorruptionError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
LAYER = 11


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Two requests some steps into their decoding on 8-bit pools, page size 4, everything looked at in each forward."""
    settings = {"page_size": 4, "topk": 2, "num_steps": 3, "num_draft_tokens": 6, "max_total_tokens": 512}
    settings |= {"kv_cache_dtype": "fp8_e4m3", "device": request.param}
    canary = CanaryConfig(mode="raise", content="full")
    engine = Engine(EngineConfig(canary=canary, **settings))
    for excerpt in load_excerpts()[:2]:
        engine.submit(engine.tokenizer.encode(excerpt.prompt)[-32:], PARAMS)
    for _ in range(3):
        engine.step()
    return engine


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def found(engine: Engine) -> Finding:
    """The first finding of the run, which must end with one."""
    with pytest.raises(KVCorruptionError) as caught:
        finish(engine)
    return caught.value.findings[0]


def slot_at(engine: Engine, position: int) -> int:
    return int(engine.request_table.table[engine.running[0].row, position])


def flip(engine: Engine, pool: str, slot: int, kind: int) -> None:
    layer = LAYER if pool == "target" else 0
    engine.pools[pool].scales.view(torch.int32)[layer, slot, kind] ^= 1 << 18


@pytest.mark.parametrize(("kind", "name"), [(0, "k_scale"), (1, "v_scale")])
@pytest.mark.parametrize("pool", ["target", "draft"])
def test_one_flipped_bit_of_a_scale_is_found_at_its_place(engine, pool, kind, name):
    """R9, with pool, slot, position, layer, and which scale: byte and bit of it."""
    slot = slot_at(engine, 20)
    flip(engine, pool, slot, kind)
    finding = found(engine)
    place = finding.code, finding.pool, finding.slot, finding.position, finding.layers
    assert place == ("R9", pool, slot, 20, (LAYER if pool == "target" else 0,))
    assert (finding.part, finding.byte, finding.bit) == (name, 2, 18)


def test_a_stale_scale_is_found(engine):
    """The scale that lay there for the slot's token before: bytes of K and V are right, and would be read wrong."""
    slot = slot_at(engine, 20)
    engine.pools["target"].scales[LAYER, slot, 1] *= 2
    finding = found(engine)
    assert (finding.code, finding.slot, finding.layers, finding.part) == ("R9", slot, (LAYER,), "v_scale")


def test_exchanged_scales_are_found(engine):
    """K's scale stands where V's belongs, and V's where K's."""
    slot = slot_at(engine, 20)
    scales = engine.pools["target"].scales[LAYER, slot]
    scales.copy_(scales.flip(0))
    finding = found(engine)
    assert (finding.code, finding.slot, finding.layers) == ("R9", slot, (LAYER,))


def test_a_store_that_takes_one_scale_for_both_is_found(engine):
    """V is divided by its own scale and stored with K's."""
    pool = engine.pools["target"]
    inner = pool.store

    def store(layer: int, slots: torch.Tensor, *values: torch.Tensor | object) -> None:
        inner(layer, slots, *values)
        if layer == LAYER:
            pool.scales[layer, slots, 1] = pool.scales[layer, slots, 0]

    pool.store = store
    finding = found(engine)
    assert (finding.code, finding.pool, finding.layers, finding.part) == ("R9", "target", (LAYER,), "v_scale")


def moving(engine: Engine, breaks: Callable[[torch.Tensor, torch.Tensor], None]) -> list[int]:
    """Compaction goes wrong as told; the slots that it writes."""
    pool, slots = engine.pools["target"], []

    def move(source: torch.Tensor, destination: torch.Tensor) -> None:
        pool.kv[:, destination] = pool.kv[:, source]
        breaks(source, destination)
        slots.extend(destination.tolist())

    pool.move = move
    return slots


def test_scales_that_stay_behind_when_their_rows_move_are_found(engine):
    """T1 at the destination, in the step of the move."""
    slots = moving(engine, lambda source, destination: None)
    finding = found(engine)
    assert finding.code == "T1"
    assert finding.slot in slots


def test_scales_that_move_with_their_rows_are_no_finding(engine):
    """The twin: K, V and scales moved by hand, one after the other."""
    scales = engine.pools["target"].scales
    slots = moving(engine, lambda source, destination: scales.index_copy_(1, destination, scales[:, source]))
    finish(engine)
    assert slots
    assert engine.canary.certificate()["findings"] == []
