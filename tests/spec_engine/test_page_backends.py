"""The engine by page tables: the tokens and the draft trees of token indices, and a canary that has nothing to say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.invariants import IndexBufferError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.attention.page_pass import PagePass
from spec_engine.attention.paged import PagedAttention
from spec_engine.drafting import drafter as drafter_module
from spec_engine.step.hooks import Forwards

PROMPTS = ["def add(a, b):", "class Foo:\n    def __init__"]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
OFF = CanaryConfig(mode="off")


def run(backend: str, *, canary: CanaryConfig = OFF, **settings) -> tuple[list[tuple[int, ...]], list]:
    """Output tokens, and the tokens of every draft tree on the way."""
    settings = {"page_size": 4, "topk": 4, "num_steps": 5} | settings
    config = EngineConfig(
        dtype="float64",
        attention_backend=backend,
        max_total_tokens=2048,
        num_draft_tokens=24 if settings["topk"] == 4 else None,
        canary=canary,
        **settings,
    )
    engine, trees = Engine(config), []
    draft = engine.drafter.draft
    engine.drafter.draft = lambda *step: trees.append(draft(*step)) or trees[-1]
    outputs = engine.generate(PROMPTS, PARAMS)
    return [output.token_ids for output in outputs], [tree.tokens.tolist() for tree in trees]


@pytest.fixture(scope="module")
def by_tokens() -> dict[int, tuple[list[tuple[int, ...]], list]]:
    """By topk, what the token-index backend gives at page size 1."""
    return {topk: run("torch", page_size=1, topk=topk) for topk in (1, 2, 4)}


@pytest.mark.parametrize("topk", [2, 4])
@pytest.mark.parametrize("page_size", [4, 16])
def test_paged_drafting_equals_token_drafting(by_tokens, page_size, topk):
    """Greedy tokens are equal, and so is every draft tree: branches on pages read the same ancestors."""
    assert run("paged", page_size=page_size, topk=topk) == by_tokens[topk]


@pytest.mark.parametrize(("name", "page_size", "topk"), [("block-table", 4, 1), ("block-table", 1, 4), ("dense", 4, 2)])
def test_other_backends_equal_token_drafting(by_tokens, name, page_size, topk):
    """Chains by ordinary block tables, trees by those of one-slot pages, and the reference."""
    assert run(name, page_size=page_size, topk=topk) == by_tokens[topk]


@pytest.mark.parametrize("content", ["write", "rolling", "full"])
def test_the_canary_is_silent_about_paged_drafting(by_tokens, content):
    """Copies of the tail and of ancestors are moves: records go along, and rows that read through them are right."""
    canary = CanaryConfig(mode="raise", content=content, poison="nan")
    assert run("paged", canary=canary)[0] == by_tokens[4][0]


def slots_of(part: PagePass) -> list[list[int]]:
    """What each row of a pass reads, in order."""
    slots = part.tables[:, :, None] * part.page_size + torch.arange(part.page_size)
    return [row[:length].tolist() for row, length in zip(slots.flatten(1), part.lens.tolist(), strict=True)]


def test_the_canary_is_told_what_the_pages_hold(monkeypatch):
    """The index array of every draft forward is, slot by slot, what its two passes read."""
    plan, reported, read = PagedAttention.plan, [], []

    def listen(attention, batch, indices):
        plan(attention, batch, indices)
        if batch.kind == "draft":
            prefix, branches = (slots_of(part) for part in attention.groups[0][1])
            reported.append(indices.tolist())
            read.append([slot for row, own in enumerate(branches) for slot in prefix[row // 4] + own])

    monkeypatch.setattr(PagedAttention, "plan", listen)
    run("paged")
    assert reported
    assert reported == read


def test_a_tail_that_was_not_copied_is_reported(monkeypatch):
    """Without the copies a branch's first page holds anything before the branch's own entries."""
    monkeypatch.setattr(Forwards, "move", lambda *a, **kw: None)
    with pytest.raises(KVCorruptionError) as caught:
        run("paged", canary=CanaryConfig(mode="raise"))
    assert {finding.pool for finding in caught.value.findings} == {"draft"}


def test_a_copied_ancestor_that_changes_is_reported(monkeypatch):
    """Under content "full" also bytes of draft entries are compared: at the latest when they are moved on (T1)."""
    move = Forwards.move

    def astray(forwards, source, destination, guesses=False):
        move(forwards, source, destination, guesses)
        if guesses:
            forwards.pool.kv[:, destination] += 1

    monkeypatch.setattr(Forwards, "move", astray)
    with pytest.raises(KVCorruptionError) as caught:
        run("paged", canary=CanaryConfig(mode="raise", content="full"))
    assert "T1" in {finding.code for finding in caught.value.findings}


@pytest.mark.parametrize("name", ["torch", "paged"])
def test_attending_columns_changes_no_token(by_tokens, name):
    """Rows that mix paths draft other trees, which costs acceptance at most: the target decides."""
    tokens, trees = run(name, attend="columns")
    assert tokens == by_tokens[4][0]
    assert trees != by_tokens[4][1]


def test_an_index_array_that_forgot_topk_is_refused_before_the_launch(toy_model, monkeypatch):
    """One branch a request does not name what four read (sgl-project/sglang#27338)."""
    own = drafter_module.concat
    monkeypatch.setattr(drafter_module, "concat", lambda entries: own([entry[: len(entry) // 4] for entry in entries]))
    launched, forward = [], Forwards.open
    monkeypatch.setattr(Forwards, "open", lambda self, batch: launched.append(batch.kind) or forward(self, batch))
    config = EngineConfig(model=str(toy_model), max_total_tokens=512, max_running_requests=1, page_size=1, topk=4)
    engine = Engine(replace(config, context_length=64))
    with pytest.raises(
        IndexBufferError, match=r"draft\[0\]: topk 4 \* \(committed 40 .* = 164 index entries <= size 41 of its buffer"
    ):
        engine.generate([[7] * 40], PARAMS)
    assert launched == ["prefill", "prefill"]
