"""A host that is one verify behind: it accepts at once, and checks, ends and frees when the next step has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvcanary import CanaryConfig, Finding, KVCorruptionError, LifetimeError
from kvcanary_tools.bench.toy.engine import ToyEngine

pytestmark = pytest.mark.usefixtures("early_slices")


class LaggingEngine(ToyEngine):
    """A drafting step appends and commits at acceptance; `on_results` and the check come when it has run."""

    def __init__(self, **config: object) -> None:
        super().__init__(CanaryConfig(**{"content": "full", "seed": 7, **config}))
        self.lags = False
        self.on_results: Callable[[], None] = lambda: None
        end_step, collect = self.canary.end_step, self.canary.collect
        self.canary.end_step = lambda: None if self.lags else end_step()
        self.canary.collect = lambda flight: frozenset() if flight is None else collect(flight)

    def draft(self, *names: str) -> None:
        self._late(super().draft, *names)

    def decode(self, *names: str) -> None:
        self._late(super().decode, *names)

    def _late(self, step: Callable[..., None], *names: str) -> None:
        self.lags = True
        step(*names)
        self.lags = False
        self.on_results()
        self.aborted = self.canary.collect(self.canary.end_step())


def found(run: Callable[..., object], *arguments: object) -> list[Finding]:
    """The findings with which a call is stopped."""
    with pytest.raises(KVCorruptionError) as caught:
        run(*arguments)
    return list(caught.value.findings)


@pytest.fixture
def make() -> Iterator[Callable[..., LaggingEngine]]:
    """A lagging engine with two requests that are drafting."""

    def started(**config: object) -> LaggingEngine:
        engine = LaggingEngine(**config)
        engine.start("first", 13)
        engine.start("second", 10)
        engine.draft()
        return engine

    with torch.inference_mode():
        yield started


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
def test_acceptance_may_come_before_the_check(make, content):
    """A commit is judged by the forwards that have run, not by those that were checked."""
    engine = make(content=content, budget=1 << 20)
    for _ in range(5):
        engine.draft()
        engine.decode()
    engine.finish("first")
    engine.draft()
    assert engine.canary.findings == []


def test_a_commit_of_what_no_forward_has_written_is_still_found(make):
    """H1 before the check, too."""
    engine = make()
    engine.lags = True
    row = engine.rows["first"]
    engine.begin()
    engine.canary.commit("first", row.committed + 1)
    engine.lags = False
    (finding,) = found(lambda: engine.canary.collect(engine.canary.end_step()))
    assert (finding.code, finding.reader) == ("H1", "first")


@pytest.mark.parametrize("content", ["full", "rolling"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_request_may_end_when_the_next_step_has_run(make, content, cut):
    """Released and freed behind the forwards of another step, with less than was committed; its pages serve others."""
    engine = make(content=content, budget=1 << 20)
    owned = engine.rows["first"].committed - cut

    def end() -> None:
        assert engine.rows["first"].committed > owned
        engine.canary.release("first", owned)
        row = engine.rows.pop("first")
        engine.canary.on_free("first", row.pages)
        engine.pages.drop(row.pages, engine.num_steps)
        engine.on_results = lambda: None

    engine.on_results = end
    engine.draft()
    for turn in range(6):
        engine.start(f"new {turn}", 60)
        engine.draft()
    for name in list(engine.rows):
        engine.finish(name)
    assert engine.canary.findings == []
    assert engine.canary.certificate()["freed_unread_bytes"] == 0


def test_a_request_may_be_dropped_when_the_next_step_has_run(make):
    """Preempted with its results still on their way: it computes its rows again."""
    engine = make()

    def drop() -> None:
        engine.preempt("first")
        engine.on_results = lambda: None

    engine.on_results = drop
    engine.draft()
    engine.prefill({"first": engine.rows["first"].prefill_len})
    engine.draft()
    assert engine.canary.findings == []


def test_a_request_that_was_released_may_still_be_in_a_batch(make):
    """It is freed a step later: until then its rows are those of all that was committed."""
    engine = make()
    owned = engine.rows["first"].committed - 1
    engine.on_results = lambda: engine.canary.release("first", owned)
    engine.draft()
    engine.on_results = lambda: None
    engine.draft()
    row = engine.rows.pop("first")
    engine.canary.on_free("first", row.pages)
    engine.draft()
    assert engine.canary.findings == []


@pytest.mark.parametrize("was_final", [False, True])
def test_what_is_not_the_request_s_own_is_not_published(make, was_final):
    """The page in which it ended is full of accepted tokens, and not final all the same."""
    engine = make()
    for _ in range(4):
        engine.draft()
    row = engine.rows["first"]
    full = row.committed // 4
    owned = full * 4 - 1
    if was_final:
        engine.canary.on_share("first", row.pages[:1])
        assert engine.canary.session.ledger.request("first").final_pages == full
    engine.canary.release("first", owned)
    with pytest.raises(LifetimeError, match=f"one of the {full - 1} final pages" if was_final else "is WRITTEN"):
        engine.canary.on_share("first", row.pages[:full])
    engine.canary.on_share("first", row.pages[: full - 1])
    engine.canary.on_free("first", row.pages)
    engine.rows.pop("first")
    engine.draft()
    assert engine.canary.findings == []


@pytest.mark.parametrize("change", [1, -100])
def test_a_request_ends_with_what_was_committed_or_less(make, change):
    """A length that acceptance has never given is a mistake of the caller."""
    engine = make()
    length = engine.rows["first"].committed
    with pytest.raises(LifetimeError, match=rf"must be in \[0, {length}\] when it ends, got {length + change}"):
        engine.canary.release("first", length + change)


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_fault_of_the_step_that_ran_meanwhile_is_found(make, name):
    """Ending one request loses nothing of what the step's forwards have read, neither of its rows nor of others."""
    engine = make(content="rolling", mode="log")
    row = engine.rows[name]
    wrong = int(engine.rows["second" if name == "first" else "first"].slots[3])

    def end() -> None:
        row.slots[3] = right
        engine.canary.release("first")
        engine.canary.on_free("first", engine.rows.pop("first").pages)

    engine.on_results, right = end, int(row.slots[3])
    row.slots[3] = wrong
    engine.draft()
    assert {(finding.code, finding.reader, finding.slot) for finding in engine.canary.findings} >= {("R8", name, wrong)}


def test_an_aborted_request_is_named_though_the_next_step_has_it(make):
    """Mode abort: the check behind the next step's forwards names it, and nobody else."""
    engine = make(mode="abort")
    engine.pools["target"].kv[0, engine.rows["first"].slots[2]] += 1
    engine.draft()
    assert engine.aborted == {"first"}
    engine.draft()
    assert engine.aborted == {"first"}
    engine.finish("first")
    engine.draft()
    assert engine.aborted == frozenset()
