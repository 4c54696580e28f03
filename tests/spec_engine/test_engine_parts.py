"""What an engine is made of: models by folder or by hand, and how large everything becomes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from kvcanary import CanaryConfig
from spec_engine import ConfigError, Engine, EngineConfig, SamplingParams
from spec_engine.assembly import Assembly
from spec_engine.mock import MockDraft, MockModel, MockTokenizer, TokenOracle
from spec_engine.models.decoder import DecoderLayer

PROMPT = [5, 40, 3, 77, 40]


def engine_of(folder: Path, **settings) -> Engine:
    settings = {"dtype": "float64", "max_total_tokens": 2048} | settings
    return Engine(EngineConfig(model=str(folder), **settings))


def test_a_standalone_draft_is_read_from_its_folder(toy_model: Path) -> None:
    """The toy checkpoint drafts for itself: whatever it drafts, it accepts."""
    params = SamplingParams(max_new_tokens=13, ignore_eos=True)
    engine = engine_of(toy_model, draft="standalone", draft_model=str(toy_model), topk=1, num_steps=3)
    plain = engine_of(toy_model, draft="none")
    assert engine.generate([PROMPT], params)[0].token_ids == plain.generate([PROMPT], params)[0].token_ids
    assert engine.head.kind == "standalone"
    assert engine.metrics.accepted_length == 4


def test_an_engine_is_built_once(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second set of pools would take as much memory again until somebody collects the first."""
    pools, make = [], Assembly._pool
    monkeypatch.setattr(Assembly, "_pool", lambda self, name, *own: pools.append(name) or make(self, name, *own))
    engine_of(toy_model, draft="none")
    assert pools == ["target"]


def test_without_drafts_the_last_layer_of_a_prompt_ends_with_its_last_token(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head goes on from the features of every token; without one nobody reads them."""
    rows: dict[str, list[int]] = {"none": [], "eagle": []}
    finish = DecoderLayer.finish
    for draft, seen in rows.items():
        monkeypatch.setattr(DecoderLayer, "finish", lambda *own, seen=seen: seen.append(len(own[1])) or finish(*own))
        engine_of(toy_model, draft=draft).generate([PROMPT, PROMPT[:3]], SamplingParams(max_new_tokens=1))
    assert rows["none"][:8] == [8] * 7 + [2]
    assert rows["eagle"][:8] == [8] * 8


@pytest.mark.parametrize(
    ("settings", "parts", "words"),
    [
        ({"draft": "standalone"}, (), "draft 'standalone' needs draft_model, got none"),
        ({"draft": "eagle"}, ("model", "tokenizer"), "a ready-made model holds no eagle head"),
        ({}, ("model",), "a ready-made model needs its tokenizer, got none"),
        ({"draft": "none"}, ("model", "draft", "tokenizer"), "needs a config that drafts, got draft 'none'"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(settings, parts, words) -> None:
    """Each sentence says what is missing."""
    model = MockModel(TokenOracle(1, 97))
    made = {"model": model, "draft": MockDraft(model, 2), "tokenizer": MockTokenizer()}
    with pytest.raises(ConfigError, match=words) as caught:
        Engine(EngineConfig(dtype="float64", **settings), **{name: made[name] for name in parts})
    assert caught.value.hint


def test_a_ready_made_model_drafts_only_by_what_comes_with_it() -> None:
    """With draft "auto" a model without a draft decodes plainly: the embedded model's head is not its own."""
    engine = Engine(EngineConfig(dtype="float64"), model=MockModel(TokenOracle(1, 97)), tokenizer=MockTokenizer())
    assert engine.head is None
    assert engine.sizes.reserve == 1


@pytest.mark.parametrize(("draft", "ahead"), [("eagle", 0), ("standalone", 1)])
@pytest.mark.parametrize(("schedule", "lag"), [("sync", 0), ("overlap", 1)])
def test_sizes_are_those_of_what_was_allocated(toy_model: Path, draft, ahead, schedule, lag) -> None:
    """Columns follow from context and reserve; bytes are counted slot by slot, with null page and padding row."""
    engine = engine_of(
        toy_model,
        draft=draft,
        draft_model=str(toy_model if ahead else toy_model / "eagle"),
        page_size=4,
        topk=2,
        num_steps=3,
        schedule=schedule,
        context_length=100,
        max_running_requests=3,
        canary=CanaryConfig(mode="raise"),
    )
    sizes = asdict(engine.sizes)
    reserve = 16 + ahead + 4 * lag  # two branches of two pages, and a verify that the host has not collected
    slots, layers = (512 + 1) * 4, {"target": 8, "draft": 8 if ahead else 1}
    assert sizes == {
        "page_size": 4,
        "num_pages": 512,
        "num_rows": 3,
        "alloc_len": 16,
        "max_accept": 4,
        "lag": lag,
        "ahead": ahead,
        "reserve": reserve,
        "context_length": 100,
        "row_width": 100 + reserve + 3,
        "pool_bytes": {name: slots * count * 2 * 2 * 8 * 8 for name, count in layers.items()},
        "table_bytes": 4 * (100 + reserve + 3) * 8,
        "canary_bytes": sum(slots * (8 + 8 + count) * 8 for count in layers.values()) + 513 * 3 * 8,
        "host_bytes": 0,
    }
