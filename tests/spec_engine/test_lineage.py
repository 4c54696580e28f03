"""Trees whose survivors do not read their ancestors: sgl-project/sglang#8409, in each form that it may have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from kvcanary import CanaryConfig, Finding, KVCorruptionError
from kvcanary.faults import arm
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.drafting import drafter, growing
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Standalone

NEVER = "draft.columns_never_regathered"
FORMS = {  # settings of every way to read, eager and captured
    "eager": {},
    "overlap": {"schedule": "overlap"},
    "captured": {"graphs": "on", "graph_buckets": [1, 2, 4]},
    "captured, overlap": {"graphs": "on", "graph_buckets": [1, 2, 4], "schedule": "overlap"},
    "whole pages": {"attention_backend": "paged"},
}
SHAPES = [(2, 3, 1), (2, 5, 16), (3, 2, 4), (4, 5, 4), (5, 3, 64), (8, 4, 16)]  # topk, num_steps, page_size


@cache
def model():
    return random_model(0, logit_scale=20.0, max_position_embeddings=256)


@pytest.fixture
def make() -> Callable[..., Engine]:
    """An engine that drafts with its own target, so that trees are deep; ``canary``: settings of its canary."""

    def engine(canary: dict[str, object] | None = None, **settings: object) -> Engine:
        config = CanaryConfig(**{"mode": "raise", "seed": 1} | (canary or {}))
        own = {"topk": 4, "num_steps": 5, "num_draft_tokens": 12, "page_size": 4, "dtype": "float64"} | settings
        own |= {"draft": "standalone", "max_total_tokens": 4096, "max_running_requests": 4, "canary": config}
        return Engine(EngineConfig(**own), model=model(), draft=Standalone(model(), model()), tokenizer=MockTokenizer())

    return engine


def run(engine: Engine) -> list[tuple[int, ...]]:
    """Three requests of different lengths, from begin to end."""
    prompts = [[(7 * k + 3 * place) % 90 for place in range(9 + 5 * k)] for k in range(3)]
    return [output.token_ids for output in engine.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))]


def found(engine: Engine) -> Finding:
    """What stops a run."""
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    return caught.value.findings[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("topk", "num_steps", "page_size"), SHAPES)
def test_clean_trees_are_silent(make, form, topk, num_steps, page_size):
    """Of every shape, read in every way; no lineage goes unjudged."""
    nodes = min(2 * topk, topk + (num_steps - 1) * topk**2 + 1)
    engine = make(topk=topk, num_steps=num_steps, num_draft_tokens=nodes, page_size=page_size, **FORMS[form])
    assert len(run(engine)) == 3
    certificate = engine.canary.certificate()
    assert certificate["findings"] == []
    assert not [reason for reason in certificate["unchecked"] if "lineage" in reason]


@pytest.mark.parametrize("form", ["eager", "overlap", "whole pages"])
def test_columns_that_are_meant_are_silent(make, form):
    """An engine that says that its branches read their columns is taken at its word, the same break armed or not."""
    engine = make(attend="columns", **FORMS[form])
    outputs = run(engine)
    with arm(NEVER) as armed:
        assert run(make(attend="columns", **FORMS[form])) == outputs
    assert armed.num_strikes


@contextlib.contextmanager
def misread(monkeypatch: pytest.MonkeyPatch, engine: Engine, read: Callable[..., Tensor]) -> Iterator[list]:
    """Survivors read by ``read(right, before, step)``: their right path, and those of the survivors before, by number.

    Gives the steps and draft forwards in which that differs for somebody who is no padding.
    """
    differs: list[tuple[int, int]] = []
    right = growing.ancestor_path

    def path(slots: Tensor, before: Tensor, parents: Tensor, step: int) -> Tensor:
        own = right(slots, before, parents, step)
        wrong = own if not step else torch.cat((read(own[:, :, :step], before, step), own[:, :, step:]), 2)
        is_live = (slots.flatten(1) >= engine.config.page_size).all(1)
        if bool(((wrong != own).flatten(1).any(1) & is_live).any()):
            differs.append((engine.canary.step, step))
        return wrong

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "ancestor_path", path)
        patched.setattr(growing.grow, "__defaults__", (path,))
        yield differs


MISREAD = {
    "never": lambda right, before, step: before,
    "from the third forward on": lambda right, before, step: right if step < 2 else before,
    "the last ancestor alone is right": lambda right, before, step: torch.cat((before[:, :, :-1], right[:, :, -1:]), 2),
    "the last ancestor alone is wrong": lambda right, before, step: torch.cat((right[:, :, :-1], before[:, :, -1:]), 2),
    "the next branch": lambda right, before, step: right.roll(1, 1) if step == 3 else right,
}


@pytest.mark.parametrize(
    ("way", "content"), [*((way, "rolling") for way in MISREAD), ("never", "write"), ("never", "full")]
)
@pytest.mark.parametrize("form", ["eager", "captured"])
def test_a_tree_that_reads_others_is_told_in_its_step(make, monkeypatch, way, form, content):
    """R5 in the first draft forward in which it matters, and family draft."""
    engine = make({"content": content}, **FORMS[form])
    with misread(monkeypatch, engine, MISREAD[way]) as differs, pytest.raises(KVCorruptionError) as caught:
        run(engine)
    findings = caught.value.findings
    finding = min(findings, key=lambda finding: finding.site)
    assert {(one.code, one.pool, one.step) for one in findings} == {("R5", "draft", differs[0][0])}
    assert finding.site == ("draft", differs[0][1])
    assert finding.layers == ()
    assert finding.causes[0].family == "draft"
    if way != "the last ancestor alone is right":
        assert finding.expected["branch"] != finding.found["branch"]


@pytest.mark.parametrize("form", [*FORMS])
def test_columns_never_regathered_by_name(make, form):
    """The catalogue's fault: both branches are named, and that the row reads its own column."""
    with arm(NEVER) as armed:
        finding = found(make(**FORMS[form]))
    assert armed.num_strikes
    assert (finding.code, finding.site[0], finding.pool) == ("R5", "draft", "draft")
    before = f"draft[{finding.site[1] - 1}]"
    parent, own = (side["branch"].removesuffix(f" of {before}") for side in (finding.expected, finding.found))
    cause = finding.causes[0]
    assert cause.text == f"row reads its own column (branch {own}), not the entries of its ancestors (branch {parent})"
    assert (cause.family, cause.basis) == ("draft", "derived")


def test_ancestors_that_are_never_copied(make, monkeypatch):
    """A reader of whole pages finds what was written for its branch where copies of its ancestors should lie."""
    monkeypatch.setattr(drafter, "ancestor_copies", lambda slots, parents, count: (slots[:, :, :0], slots[:, :, :0]))
    finding = found(make(attention_backend="paged"))
    assert (finding.code, finding.causes[0].family) == ("R5", "draft")
    assert "own column" in finding.causes[0].text


def test_copies_of_the_last_ancestor_alone(make, monkeypatch):
    """Those above it were forgotten: the copy does not continue what lies in front of it."""
    copies = drafter.ancestor_copies
    monkeypatch.setattr(
        drafter, "ancestor_copies", lambda *given: tuple(slots[:, :, -1:].contiguous() for slots in copies(*given))
    )
    finding = found(make(attention_backend="paged"))
    assert (finding.code, finding.causes[0].family) == ("R5", "draft")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_engine_without_a_canary_declares_nothing(device):
    """No lineage is made, and no buffer for one, where nobody asks."""
    settings = {"topk": 2, "num_steps": 3, "max_total_tokens": 512, "context_length": 64, "device": device}
    for mode, asks in (("off", [False, False]), ("raise", [False, True])):
        config = EngineConfig(canary=CanaryConfig(mode=mode), graphs="on", graph_buckets=[2], **settings)
        engine = Engine(config)
        engine.generate(["def f(a):"], SamplingParams(max_new_tokens=4))
        drafts = engine.runner._bucket.step._draft_forwards
        assert [hooked.forward.lineage is not None for hooked in drafts] == asks
