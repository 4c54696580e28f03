"""Graphs change no token and leave nothing unchecked: outputs and coverage are those of an engine without them."""

from __future__ import annotations

import itertools
import random

import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.graphs.feed import Feed
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Standalone
from spec_engine.models.embedded import load_excerpts
from spec_engine.step.hooks import Forwards

GRID = [
    {"page_size": page_size, "topk": topk, "num_steps": steps, "schedule": schedule}
    for page_size, topk, steps, schedule in itertools.product((1, 4, 16), (1, 2, 4), (1, 2, 3, 4), ("sync", "overlap"))
]
CHOSEN = random.Random(5).sample(GRID, 6)


def name(settings: dict) -> str:
    return "P{page_size}-K{topk}-T{num_steps}-{schedule}".format(**settings)


def check(make, outcome, settings: dict, **sampling: object) -> None:
    """Three requests in a bucket of four. A host that is behind has fewer bytes to plan with, by those of a step."""
    plain, coverage = outcome(make(**settings), **sampling)
    captured, own = outcome(make(graphs="on", **settings), **sampling)
    assert captured == plain
    if settings.get("schedule") == "overlap":
        assert 0.97 * coverage["bytes_checked"] < own.pop("bytes_checked") <= coverage.pop("bytes_checked")
    assert own == coverage


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("settings", [{"draft": "none"}, {"topk": 2, "num_steps": 3, "page_size": 4}], ids=str)
@pytest.mark.parametrize("own", [{"salt": "tenant"}, {"adapter": "law"}], ids=str)
def test_salted_requests_come_and_go_between_captured_steps(make, monkeypatch, settings, schedule, own):
    """Their chains have a root of their own: nothing fires, and tokens are those of steps without graphs.

    Every forward but those of prompts is a program's: 19 steps of one token, or five of four, whose extend is another.
    """
    outputs, eager, runs = [], [], []
    open_one, send = Forwards.open, Feed.send
    monkeypatch.setattr(Forwards, "open", lambda self, batch: eager.append(batch.kind) or open_one(self, batch))
    monkeypatch.setattr(Feed, "send", lambda self: runs.append(self) or send(self))
    for graphs in ("off", "on"):
        eager.clear()
        engine = make(graphs=graphs, dtype="float64", schedule=schedule, prefix_cache=False, **settings)
        events = []
        for number, excerpt in enumerate(load_excerpts()[20:23]):
            params = SamplingParams(max_new_tokens=8 + 6 * number, ignore_eos=True)
            engine.submit(excerpt.prompt[:80], params, **own if number == 1 else {})
            events += engine.step()
        while engine.has_work:
            events += engine.step()
        assert engine.canary.certificate()["findings"] == []
        outputs.append([[t for e in events if e.request_id == f"req-{n}" for t in e.token_ids] for n in range(3)])
    assert [len(tokens) for tokens in outputs[0]] == [8, 14, 20]
    assert outputs[0] == outputs[1]
    assert (set(eager), len(runs) >= 10) == ({"prefill"}, True)


@pytest.mark.parametrize("settings", CHOSEN, ids=name)
def test_drafting_with_graphs_is_drafting(make, outcome, settings):
    """Pages, widths, depths and schedules."""
    check(make, outcome, settings | {"dtype": "float64"})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [case for case in GRID if case not in CHOSEN], ids=name)
def test_drafting_with_graphs_is_drafting_everywhere(make, outcome, settings):
    """All others."""
    check(make, outcome, settings | {"dtype": "float64"})


@pytest.mark.parametrize(("draft", "dtype"), [("none", "float32"), ("none", "float64"), ("eagle", "float32")])
def test_with_each_number_type(make, outcome, draft, dtype):
    """Plain decode steps, and drafting with the other head."""
    check(make, outcome, {"draft": draft, "dtype": dtype, "page_size": 4})


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 3, "top_p": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"logprobs": 2},
    ],
    ids=["drawn", "penalised", "logprobs"],
)
def test_with_each_way_to_sample(make, outcome, sampling):
    """Whatever the acceptance looks at, it sees the same."""
    check(make, outcome, {"topk": 2, "num_steps": 2}, **sampling)


@pytest.mark.parametrize(("page_size", "topk", "num_steps"), [(4, 1, 4), (16, 3, 2)])
def test_a_draft_model_of_its_own(page_size, topk, num_steps):
    """Its pool is one entry ahead in everything; drafting for itself it is accepted whole."""
    target = random_model(3, logit_scale=30.0, max_position_embeddings=128)
    settings = {"page_size": page_size, "topk": topk, "num_steps": num_steps, "dtype": "float64"}
    results = []
    for graphs in ("off", "on"):
        config = EngineConfig(draft="standalone", graphs=graphs, canary=CanaryConfig(mode="raise"), **settings)
        engine = Engine(config, model=target, draft=Standalone(target, target), tokenizer=MockTokenizer())
        outputs = engine.generate([[5, 6, 7], [9] * 17 + [2]], SamplingParams(max_new_tokens=1 + 3 * (num_steps + 1)))
        assert engine.metrics.accepted_length == num_steps + 1
        certificate = engine.canary.certificate()
        results.append(
            [*(output.token_ids for output in outputs), certificate["slots_checked"], certificate["forwards"]]
        )
    assert results[0] == results[1]


def test_tree_sampling(make, outcome):
    """Acceptance by tree sampling takes the same coins to the same nodes."""
    settings = {"dtype": "float64", "topk": 2, "num_steps": 3, "acceptance": "tree", "threshold_single": 0.7}
    check(make, outcome, settings, temperature=0.9, seed=11)


def test_the_smallest_bucket_that_fits_runs_and_none_where_none_does(make, outcome):
    """Requests come and go over two buckets and a batch size that has none; each batch covers its own rows."""
    prompts = [excerpt.prompt[:60] for excerpt in load_excerpts()[20:26]]
    settings = {"topk": 2, "num_steps": 2, "max_running_requests": 5}
    plain = outcome(make(**settings), prompts, max_new_tokens=9)
    captured = outcome(make(graphs="on", graph_buckets=[3, 1], **settings), prompts, max_new_tokens=9)
    assert captured == plain


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("live", [1, 2, 3, 4])
def test_every_live_batch_size_of_a_bucket(make, outcome, live, device):
    """Exactly the live rows are judged: as many forwards, slots and bytes as without graphs, and the same tokens."""
    prompts = [excerpt.prompt[:40] for excerpt in load_excerpts()[20 : 20 + live]]
    settings = {"topk": 2, "num_steps": 2, "page_size": 4, "dtype": "float32", "device": device}
    plain = outcome(make(**settings), prompts, max_new_tokens=5)
    captured = outcome(make(graphs="on", graph_buckets=[4], **settings), prompts, max_new_tokens=5)
    assert captured == plain


def test_under_pressure_with_shared_prefixes(make, outcome):
    """Retraction, resumption and the prefix cache go on as they do."""
    prompts = [f"def f(a, b):\n    return {tail}" for tail in ("a + b", "a - b", "a", "b")]
    settings = {"dtype": "float64", "page_size": 4, "topk": 2, "num_steps": 2, "max_total_tokens": 96}
    settings |= {"new_token_ratio": 0.0, "max_running_requests": 5}
    engine = make(graphs="on", **settings)
    captured = outcome(engine, prompts, max_new_tokens=16)
    assert captured == outcome(make(**settings), prompts, max_new_tokens=16)
    assert engine.metrics.num_retractions > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "none", "page_size": 4},
        {"page_size": 4, "topk": 2, "num_steps": 3, "schedule": "overlap"},
        {"page_size": 1, "topk": 1, "num_steps": 2},
    ],
    ids=str,
)
def test_pools_of_8_bit_numbers(make, outcome, settings):
    """The canary stores scales with K and V, and attention reads them; the same tokens, as much is checked."""
    check(make, outcome, settings | {"dtype": "float64", "kv_cache_dtype": "fp8_e4m3"})
