"""The first cause of faults in the engine's own code, and silence where nothing is changed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.drafting import drafter
from spec_engine.graphs import drafting as captured
from spec_engine.graphs.feed import Feed
from spec_engine.memory.pools import split_pool
from spec_engine.mock import KnownDraft, MockTokenizer, known_text, random_model

VOCABULARY = 97
PAGED = {"page_size": 4, "topk": 3, "num_steps": 3, "attention_backend": "paged"}
TREE = {"page_size": 4, "topk": 2, "num_steps": 3}
SPLIT = {"page_size": 8, "topk": 1, "num_steps": 2, "max_device_tokens": 112, "device_turn": 2}
GRAPHS = TREE | {"graphs": "on"}


@cache
def model():
    return random_model(0, logit_scale=20.0, max_position_embeddings=256, num_hidden_layers=2)


@cache
def texts():
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCABULARY, (21 + 3 * k,), generator=generator).tolist() for k in range(3)]
    return [known_text(model(), prompt, 60) for prompt in prompts]


def run(settings, strike=None):
    """Three requests of other lengths, and three more behind them; the report that stopped them, or None."""
    most, topk = settings["num_steps"], settings["topk"]
    accepted = lambda text, length: 1 + (7 * text + 13 * length) % (most + 1)  # noqa: E731
    draft = KnownDraft(model(), texts(), accepted, is_second=topk > 1)
    canary = CanaryConfig(mode="raise", content="full", seed=1)
    config = EngineConfig(dtype="float64", max_total_tokens=1024, max_running_requests=6, canary=canary, **settings)
    engine = Engine(config, model=model(), draft=draft, tokenizer=MockTokenizer())
    if strike is not None:
        strike(engine)
    try:
        for number in range(4):
            if number in (0, 2):
                for text in texts():
                    engine.submit(list(text.prompt), SamplingParams(max_new_tokens=20, ignore_eos=True))
            engine.step()
        while engine.has_work:
            engine.step()
    except KVCorruptionError as error:
        return error.report
    return None


def move_in_silence(monkeypatch):
    """Accepted entries are compacted, and the canary is not told."""

    def strike(engine):
        own = engine.canary.on_move
        reported = lambda pool, *move, **more: None if pool == "target" else own(pool, *move, **more)  # noqa: E731
        monkeypatch.setattr(engine.canary, "on_move", reported)

    return strike


def forget_a_tail(monkeypatch):
    """The prefix tail is copied for branch 1, and not for branch 2."""
    own = drafter.tail_copies

    def first_alone(*args, **layout):
        tails, copies = own(*args, **layout)
        tails[:, 1:], copies[:, 1:] = 0, 0
        return tails, copies

    monkeypatch.setattr(drafter, "tail_copies", first_alone)


def repeat_a_column(monkeypatch):
    """The captured draft forward 1 writes where forward 0 wrote."""
    own = captured.branch_positions

    def repeated(*args, **layout):
        positions = own(*args, **layout)
        positions[:, :, 1] = positions[:, :, 0]
        return positions

    monkeypatch.setattr(captured, "branch_positions", repeated)


def keep_old_copies(monkeypatch):
    """Pages that were written since they were saved on the host count as saved."""

    own = split_pool.SplitPool.bring

    def unmarked(self, what, rows):
        own(self, what, [row._replace(first_new=len(row.pages) * self.page_size) for row in rows])

    monkeypatch.setattr(split_pool.SplitPool, "bring", unmarked)


def pad_with_the_last_row(monkeypatch):
    """Rows of padding name the last live request's row of the table."""
    own = Feed.set

    def padded(self, **sections):
        own(self, **sections)
        if sections.get("rows"):
            where = self._sections["rows"]
            self._numbers[where.start + len(sections["rows"]) : where.stop] = sections["rows"][-1]

    monkeypatch.setattr(Feed, "set", padded)


CASES = [
    (move_in_silence, TREE, ("R9",), "transfer", "accepted entries were moved, and the canary was not told"),
    (forget_a_tail, PAGED, ("R12", "R4", "R5"), "transfer", "the prefix tail was not copied for branch 2"),
    (repeat_a_column, GRAPHS, ("R12",), "addressing", "a slot that holds an earlier entry of its own row"),
    (keep_old_copies, SPLIT, ("T1",), "transfer", "stale: "),
    (pad_with_the_last_row, GRAPHS, ("W9",), "graphs", "a row of padding names a live request's row"),
]


@pytest.mark.parametrize(("fault", "settings", "codes", "family", "words"), CASES, ids=[c[0].__name__ for c in CASES])
def test_the_first_cause_is_what_was_broken(monkeypatch, fault, settings, codes, family, words):
    """Family and words; no report says the same on both sides of a check; padding is no request that ended."""
    report = run(settings, fault(monkeypatch))
    finding = report.findings[0]
    assert finding.code in codes, report.text()
    assert (finding.causes[0].family, words in finding.causes[0].text) == (family, True), report.text()
    for reported in report.findings:
        assert not reported.expected or not reported.expected.items() <= reported.found.items(), report.text()
    assert "a request that ended long ago, verify" not in report.text()


@pytest.mark.parametrize("settings", [TREE, PAGED, GRAPHS, SPLIT], ids=["tree", "paged", "graphs", "split"])
def test_nothing_is_found_where_nothing_is_broken(settings):
    """The same requests in the engine as it is."""
    assert run(settings) is None
