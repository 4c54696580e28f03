"""Steps of drafted trees that a loop proves clean: what is true behind them is what the general path makes true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcanary import CanaryConfig, CanaryManager
from kvcanary.captured.step import CapturedStep, SentStep
from kvcanary.dumps.reading import read_dump
from kvcanary.faults.catalogue import find
from kvcanary.faults.target import Setup
from kvcanary_tools.campaign.configurations import setup_for
from kvcanary_tools.campaign.engines import build
from kvcanary_tools.campaign.traffic import Run, play
from spec_engine import Engine, SamplingParams
from spec_engine.mock import KnownDraft

TREES = Setup(num_steps=3, batch=3, new_tokens=14, schedule="overlap", graphs=True, content="rolling")
CASES = [  # and whether anything that is drafted is accepted
    (replace(TREES, topk=2, page_size=1), True),
    (replace(TREES, topk=4, page_size=4), True),
    (replace(TREES, topk=4, page_size=4, new_tokens=8), False),
    (replace(TREES, topk=4, page_size=16, num_steps=2), True),
    (replace(TREES, topk=2, page_size=4, batch=4, pages=36, new_token_ratio=0.1, new_tokens=18), True),  # retracted
]


class Steps:
    """Engines of one setup in turns: what one of them lands in one loop, the other leaves to the general path.

    quiet: how often a step with moves was landed at once, and how often not;  moved: entries
    """

    def __init__(self, setup: Setup, accepts: bool) -> None:
        self.quiet, self.moved = {True: 0, False: 0}, 0
        self.engines = [self._engine(setup, accepts) for _ in "ab"]
        first, second = (engine.canary.session.checks.captured for engine in self.engines)
        land = first.collect_quiet
        first.collect_quiet = lambda reported, *rest: self._note(reported, land(reported, *rest))
        second.collect_quiet = lambda *_: False

    def _engine(self, setup: Setup, accepts: bool) -> Engine:
        bench = build(setup, CanaryConfig(seed=7, ring=64, dump_content=True))
        draft = bench.engine.drafter.head
        assert isinstance(draft, KnownDraft)
        if not accepts:
            draft.accept_len = lambda *_: 1
        for number in range(setup.batch):
            prompt = bench.texts[number % len(bench.texts)][: setup.prompt_len + number]
            bench.engine.submit(prompt, SamplingParams(max_new_tokens=setup.new_tokens - number, ignore_eos=True))
        return bench.engine

    def _note(self, reported: SentStep, is_quiet: bool) -> bool:
        if reported.moves:
            self.quiet[is_quiet] += 1
            self.moved += sum(move.entries.shape[1] for move in reported.moves)
        return is_quiet

    def __iter__(self) -> Iterator[Sequence[CanaryManager]]:
        while any(engine.has_work for engine in self.engines):
            events = [engine.step() for engine in self.engines]
            assert events[0] == events[1]
            yield [engine.canary for engine in self.engines]


def state_of(canary: CanaryManager) -> dict[str, Any]:
    """All that a step changes which lands."""
    ledger, checks, static = canary.session.ledger, canary.session.checks, canary.session.checks.captured
    names = ("committed_len", "final_pages", "in_flight", "pending_acceptances", "uncollected", "pages")
    requests = {
        name: [*(getattr(request, one) for one in names), request.tokens.tolist(), request.row_lens.tolist()]
        + [queue.oldest_first() for queue in request.reads]
        for name, request in ledger.requests.items()
    }
    pages = [getattr(ledger, name).tobytes() for name in ("generations", "owners", "states", "refcounts")]
    record_store = checks.record_store
    records = record_store.memory.tobytes(), record_store.judged.tobytes()
    return {
        "requests": requests,
        "pages": pages,
        "records": records,
        "headers": static.registry._seen.tobytes(),
        "pending_acceptances": static.num_pending_acceptances,
    }


def dumped(canary: CanaryManager, path: Path) -> list[object]:
    """What was recorded of it, as a dump holds it."""
    dump = read_dump(canary.dump(path))
    events = [{name: np.asarray(value).tolist() for name, value in call.items()} for call in dump.events]
    arrays = {name: values.tolist() for name, values in dump.arrays.items() if name != "now.records"}  # by a drawn key
    return [events, dump.findings, dump.start, dump.now, arrays]


@pytest.mark.parametrize(("setup", "accepts"), CASES, ids=lambda one: getattr(one, "topk", one))
def test_what_is_true_behind_a_quiet_step_of_trees(
    setup: Setup, accepts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests, pages, records, coverage and the recording; no step is left to the general path, whatever room it
    lacks.
    """
    monkeypatch.setattr("kvcanary.ledger.reread_queue.LEAST_ROOM", 4)
    steps = Steps(setup, accepts)
    for first, second in steps:
        assert state_of(first) == state_of(second)
    assert dumped(first, tmp_path / "quiet.kvdump") == dumped(second, tmp_path / "general.kvdump")
    certificates = [canary.certificate() for canary in (first, second)]
    assert certificates[0] == certificates[1]
    assert certificates[0]["findings"] == []
    assert (steps.quiet[True] > 5, steps.quiet[False]) == (True, 0)
    assert (steps.moved > 0) == accepts
    assert (steps.engines[0].metrics.num_retractions > 0) == (setup.pages is not None)


#: By fault, its code: what damages records, rows, pages and bytes between steps and within one.
FAULTS = {
    "bits.record_damaged": "R3",
    "addressing.pages_exchanged": "R4",
    "draft.compaction_lost": "T1",
    "draft.columns_never_regathered": "R5",
    "lifetime.freed_while_read": "R7",
    "order.later_step": "R11",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_captured_step_of_trees_is_found_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings, the step that they stop and the tokens that leave before it are those of the general path."""
    setup, ends, land = setup_for(find(name), replace(CASES[1][0], batch=2)), [], CapturedStep.collect_quiet
    left: list[int] = []

    def noting(static: CapturedStep, reported: SentStep, *rest: Any) -> bool:
        is_quiet = land(static, reported, *rest)
        if reported.moves and not is_quiet:
            left.append(reported.step)
        return is_quiet

    for path in (noting, lambda *_: False):
        monkeypatch.setattr(CapturedStep, "collect_quiet", path)
        played = play(Run(name, "trees", setup, 3), find(name))
        found = [vars(finding) | {"hardware": "its address is the engine's"} for finding in played.findings]
        ends.append((found, str(played.error), played.step, played.left, played.strike))
    assert ends[0] == ends[1]
    assert ends[0][0][0]["code"] == FAULTS[name]
    assert ends[0][0][0]["step"] in left  # the step with moves in which it was found went to the general path
