"""Engines with and without graphs that get the same prompts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.core import Batch
from spec_engine.graphs.decode import DecodeProgram
from spec_engine.graphs.drafting import DraftProgram
from spec_engine.models.embedded import load_excerpts
from spec_engine.step.verify import Accepted

COVERAGE = ("forwards", "slots_checked", "slots_sealed", "bytes_checked", "unchecked")
PROMPTS = [excerpt.prompt[:80] for excerpt in load_excerpts()[20:23]]


@pytest.fixture(autouse=True)
def _slices_in_short_runs(early_slices: None) -> None:
    """Runs here are short."""


@pytest.fixture
def make() -> Callable[..., Engine]:
    """Engine over the embedded model, by settings; ``mode``: of its canary."""

    def engine(mode: str = "raise", **settings: object) -> Engine:
        settings = {"max_total_tokens": 1024, "context_length": 160, "max_running_requests": 4} | settings
        canary = CanaryConfig(mode=mode, seed=5)
        return Engine(EngineConfig(canary=canary, **settings))

    return engine


@pytest.fixture
def outcome() -> Callable[..., tuple[list[tuple[int, ...]], dict[str, object]]]:
    """``(engine, prompts=, **sampling) -> outputs and coverage``."""

    def run(engine: Engine, prompts: list[str] = PROMPTS, **sampling: object):
        params = SamplingParams(**{"max_new_tokens": 10, "ignore_eos": True} | sampling)
        outputs = [output.token_ids for output in engine.generate(prompts, params)]
        if engine.canary is None:
            return outputs, {}
        certificate = engine.canary.certificate()
        assert certificate["findings"] == []
        return outputs, {name: certificate[name] for name in COVERAGE}

    return run


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches for whose tokens the host stood still within their own step."""
    seen: list[int] = []

    def noting(fetch: Callable[..., list[Accepted]]) -> Callable[..., list[Accepted]]:
        def noted(program: DecodeProgram | DraftProgram, batch: Batch) -> list[Accepted]:
            seen.append(len(batch))
            return fetch(program, batch)

        return noted

    for program in (DecodeProgram, DraftProgram):
        monkeypatch.setattr(program, "fetch", noting(program.fetch))
    return seen
