"""One flipped bit anywhere in the live KV bytes of a running engine is found, and named to the bit."""

from __future__ import annotations

import random

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

ROTATION = 8  # steps in which the rolling check re-reads every live byte
NEW_TOKENS = 40
PLACES = 200
SAMPLE = 10


def make_engine(content: str, budget: int | None = None) -> Engine:
    return Engine(
        EngineConfig(max_total_tokens=2048, canary=CanaryConfig(mode="raise", content=content, budget=budget))
    )


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    """One engine a content mode; a fault leaves an engine unusable, so a found fault makes a fresh one."""
    return {}


def prompt_of(seed: int) -> str:
    return load_excerpts()[seed % len(load_excerpts())].prompt


def live_bytes(engine: Engine, length: int) -> int:
    """Bytes of ``length`` slots in all pools."""
    return sum(length * pool.kv[:, 0].nbytes for pool in engine.pools.values())


def flip(engine: Engine, rng: random.Random) -> dict:
    """Flip one bit of a committed slot; returns its place in the report's words."""
    request = engine.running[0]
    pool = engine.pools[rng.choice(sorted(engine.pools))]
    position = rng.randrange(request.committed_len)
    slot = int(engine.request_table.table[request.row, position])
    layer, part = rng.randrange(pool.kv.shape[0]), rng.randrange(2)
    head, dim = rng.randrange(pool.kv.shape[3]), rng.randrange(pool.kv.shape[4])
    bit = rng.randrange(32)
    word = pool.kv.view(torch.int32)[layer, slot, part, head, dim : dim + 1]
    word ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    return {
        "pool": pool.name,
        "slot": slot,
        "position": position,
        "layer": layer,
        "part": "KV"[part],
        "head": head,
        "dim": dim,
        "bit": bit,
    }


def run_faulty(content: str, seed: int) -> tuple[dict, KVCorruptionError, int]:
    """Run a request, flip a bit in the middle; returns the place, the error and the steps until it came."""
    rng = random.Random(f"{content}:{seed}")
    engine = make_engine(content)
    if content == "rolling":
        most = len(engine.tokenizer.encode(prompt_of(seed))) + NEW_TOKENS
        engine = make_engine(content, budget=-(-live_bytes(engine, most) // ROTATION))
    engine.submit(prompt_of(seed), SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    for _ in range(rng.randrange(2, 7)):
        engine.step()
    place = flip(engine, rng)
    first = engine.metrics.num_steps
    with pytest.raises(KVCorruptionError) as caught:
        _run_to_the_end(engine)
    return place, caught.value, engine.metrics.num_steps - first


def _run_to_the_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def assert_named(place: dict, error: KVCorruptionError) -> None:
    """The first finding is R9 at exactly this place."""
    finding = error.findings[0]
    assert finding.code == "R9"
    assert {name: getattr(finding, name) for name in place} == place


SEEDS = [pytest.param(seed, marks=[] if seed < SAMPLE else pytest.mark.slow) for seed in range(PLACES)]


@pytest.mark.parametrize("seed", SEEDS)
def test_full_finds_a_flipped_bit_in_the_forward_that_reads_it(seed):
    """With content=full the very next step stops, and the report names pool, slot, layer, part, head, dim and bit."""
    place, error, steps = run_faulty("full", seed)
    assert steps == 1
    assert_named(place, error)


@pytest.mark.parametrize("seed", SEEDS)
def test_rolling_finds_a_flipped_bit_within_one_rotation(seed):
    """With content=rolling it is found within a rotation or when the request ends, at the same place."""
    place, error, steps = run_faulty("rolling", seed)
    assert steps <= ROTATION + 1
    assert_named(place, error)


@pytest.mark.parametrize("content", ["write", "rolling", "full"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_run_finds_nothing(engines, content, seed):
    """The same traffic without a flip: no finding, and every check class was active."""
    engine = engines.setdefault(content, make_engine(content))
    engine.generate([prompt_of(seed)], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    certificate = engine.canary.certificate()
    assert certificate["findings"] == []
    assert certificate["slots_checked"] > 0
