"""Modes log and abort over the engine: what is told wrongly of pages and requests ends nobody who is not named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams

PROMPTS = ["def f(a):", "class A:", "import os"]
SETTINGS = {
    "eager": {},
    "overlap": {"schedule": "overlap"},
    "graphs": {"graphs": "on", "graph_buckets": [4]},
    "graphs-overlap": {"graphs": "on", "graph_buckets": [4], "schedule": "overlap"},
}


def double_free(engine: Engine) -> None:
    engine.canary.on_evict([_free_page(engine)])


def free_of_no_page(engine: Engine) -> None:
    engine.canary.on_free("req-1", [10_000])


def evict_of_private(engine: Engine) -> None:
    engine.canary.on_evict(_row(engine, "req-1")[-1:])


def share_of_writable(engine: Engine) -> None:
    engine.canary.on_share("req-1", _row(engine, "req-1")[-1:])


def grant_of_ones_own(engine: Engine) -> None:
    engine.canary.on_alloc("req-1", _row(engine, "req-1")[:1])


def load_in_use(engine: Engine) -> None:
    engine.canary.on_load_begin("req-1", _row(engine, "req-1")[:1])


def commit_shrinks(engine: Engine) -> None:
    engine.canary.commit("req-1", 1)


def admitted_twice(engine: Engine) -> None:
    engine.canary.admit("req-1", [1, 2])


MISTAKES = [
    double_free,
    free_of_no_page,
    evict_of_private,
    share_of_writable,
    grant_of_ones_own,
    load_in_use,
    commit_shrinks,
    admitted_twice,
]


def _row(engine: Engine, name: str) -> list[int]:
    return engine.canary.session.ledger.request(name).pages


def _free_page(engine: Engine) -> int:
    return int((engine.canary.session.ledger.states == 0).nonzero()[0][-1])


def _outputs(settings: dict[str, object], mode: str, mistake: Callable[[Engine], None] | None) -> tuple[Engine, dict]:
    shape = {"max_total_tokens": 512, "context_length": 64, "max_running_requests": 4, "page_size": 4}
    canary = CanaryConfig(mode=mode, seed=5, content="full")
    engine = Engine(EngineConfig(canary=canary, dtype="float32", topk=2, num_steps=3, **shape, **settings))
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True))
    outputs: dict[str, list] = {}
    steps = 0
    while engine.has_work:
        steps += len(engine.running) == len(PROMPTS)
        if steps == 3 and mistake is not None:
            mistake(engine)
            mistake = None
        for event in engine.step():
            outputs.setdefault(event.request_id, []).append((event.token_ids, event.finish_reason))
    return engine, outputs


@pytest.fixture(scope="module")
def clean() -> Callable[[str], dict]:
    known: dict[str, dict] = {}

    def of(name: str) -> dict:
        if name not in known:
            known[name] = _outputs(SETTINGS[name], "log", None)[1]
        return known[name]

    return of


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("name", SETTINGS)
def test_log_leaves_every_output_as_it_is(clean, name: str, mistake: Callable[[Engine], None]) -> None:
    """One L1, and all tokens are those of a run in which nothing wrong was told."""
    engine, outputs = _outputs(SETTINGS[name], "log", mistake)
    assert [finding.code for finding in engine.canary.findings] == ["L1"]
    assert outputs == clean(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_abort_ends_the_one_that_is_named(clean, name: str) -> None:
    """With kv_corruption; the others end as they would have."""
    _, outputs = _outputs(SETTINGS[name], "abort", commit_shrinks)
    assert outputs.pop("req-1")[-1][1] == "kv_corruption"
    assert len(outputs) == 2
    assert outputs == {key: clean(name)[key] for key in outputs}
