"""Faults in a running engine: arm one between two steps, and see which finding stops it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcanary import CanaryConfig, KVCorruptionError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPT_LEN = 64
WARM_STEPS = 4


@pytest.fixture(autouse=True)
def _slices_in_short_runs(early_slices: None) -> None:
    """Runs here are short."""


@pytest.fixture(name="make_engine")
def make_engine_fixture() -> Callable[..., Engine]:
    """:func:`running_engine`, for tests."""
    return running_engine


def running_engine(disable: frozenset[str] = frozenset(), num_steps: int = 3) -> Engine:
    """Two requests of equally long prompts, some steps into their decoding; page size 4."""
    canary = CanaryConfig(mode="raise", content="full", disable=disable)
    settings = {"page_size": 4, "topk": 2, "num_draft_tokens": 6, "max_total_tokens": 1024}
    engine = Engine(EngineConfig(num_steps=num_steps, canary=canary, **settings))
    for excerpt in load_excerpts()[:2]:
        engine.submit(engine.tokenizer.encode(excerpt.prompt)[-PROMPT_LEN:], PARAMS)
    for _ in range(WARM_STEPS):
        engine.step()
    return engine


@pytest.fixture
def strike() -> Callable[..., KVCorruptionError | None]:
    """Run to the end with a fault armed; the error that stopped the run, or None."""

    def run(
        fault: Callable[[Engine], object], disable: frozenset[str] = frozenset(), num_steps: int = 3
    ) -> KVCorruptionError | None:
        engine = running_engine(disable, num_steps)
        fault(engine)
        try:
            while engine.has_work:
                engine.step()
        except KVCorruptionError as error:
            return error
        return None

    return run
