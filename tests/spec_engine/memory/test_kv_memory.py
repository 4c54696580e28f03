"""Rows that grow in one step: what the canary is told of their pages, together, and in what order beside the rest."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvcanary import CanaryConfig
from kvcanary.errors import PageStateError
from kvcanary.invariants import EstimateError
from spec_engine import Engine, EngineConfig, SamplingParams

PAGE_SIZE, LENGTH = 4, 7  # two entries behind its prompt a request needs a third page


@pytest.fixture
def engine(toy_model) -> Engine:
    """Three requests of one length, whose next steps need a page each, in the same step."""
    config = EngineConfig(
        model=str(toy_model), draft="none", page_size=PAGE_SIZE, max_total_tokens=256, canary=CanaryConfig()
    )
    engine = Engine(config)
    for first in range(3):
        engine.submit(list(range(first, first + LENGTH)), SamplingParams(max_new_tokens=12, ignore_eos=True))
    while not all(request.output_ids for request in engine.running) or len(engine.running) < 3:
        engine.step()
    return engine


@pytest.fixture
def reported(engine, monkeypatch) -> list[tuple[str, object]]:
    """What the canary is told of pages from now on: the call, and whom it names."""
    events: list[tuple[str, object]] = []

    def noted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def note(first: object, *others: object) -> None:
            events.append((name, first))
            call(first, *others)

        return note

    for name in ("on_alloc", "on_alloc_all"):
        monkeypatch.setattr(engine.canary, name, noted(name, getattr(engine.canary, name)))
    monkeypatch.setattr(engine.canary, "on_evict", lambda pages: events.append(("on_evict", pages)))
    return events


def grow(engine: Engine, most: int = 99) -> None:
    """All of them, by a page each."""
    first = engine.running[0]
    reserve = (len(first.pages) + 1) * PAGE_SIZE - first.committed_len
    engine.memory.grow_all(engine.running, reserve, lambda request: 99 if request is first else most)


def names(engine: Engine, *numbers: int) -> tuple[str, ...]:
    return tuple(engine.running[number].request_id for number in numbers)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def expect_known(engine: Engine) -> None:
    """The canary's rows are the engine's."""
    for request in engine.running:
        assert engine.canary.session.ledger.request(request.request_id).pages == request.pages


def test_pages_of_a_step_are_told_in_one_call(engine, reported):
    """Of a step in which all need one; a step in which nobody does tells of none."""
    everybody = names(engine, 0, 1, 2)
    calls = []
    for _ in range(2 * PAGE_SIZE):
        reported.clear()
        engine.step()
        calls.append(list(reported))
        expect_known(engine)
    assert calls.count([("on_alloc_all", everybody)]) == 2
    assert calls.count([]) == len(calls) - 2
    assert engine.canary.findings == []


def test_what_else_is_told_comes_behind_what_was_granted_before(engine, reported, monkeypatch):
    """An eviction that makes room for one request: pages of those before it, then the eviction, then its own."""
    evicted = iter([[], [], [17]])
    monkeypatch.setattr(engine.memory.cache, "make_room", lambda count: next(evicted))
    grow(engine)
    assert reported == [
        ("on_alloc_all", names(engine, 0, 1)),
        ("on_evict", [17]),
        ("on_alloc_all", names(engine, 2)),
    ]
    expect_known(engine)


def test_pages_for_a_load_are_told_by_themselves(engine, reported):
    """No forward writes them; what was granted before them is told before."""
    first, second, third = names(engine, 0, 1, 2)
    loaded = engine.running[1]
    loaded.block = SimpleNamespace(places=range(len(loaded.pages) + 1))
    grow(engine)
    assert reported == [("on_alloc_all", (first,)), ("on_alloc", second), ("on_alloc_all", (third,))]
    expect_known(engine)


def test_outside_of_a_decode_step_pages_are_told_at_once(engine, reported):
    """As those of a prompt are."""
    request = engine.running[0]
    engine.memory.grow(request, len(request.pages) * PAGE_SIZE + 1, 0, 99)
    assert reported == [("on_alloc", request.request_id)]


def test_what_was_granted_is_told_though_one_fails(engine, reported):
    """The canary knows whose pages they are when the error comes out, and nothing waits for the next step."""
    with pytest.raises(EstimateError):
        grow(engine, most=0)
    assert reported == [("on_alloc_all", names(engine, 0, 1))]
    expect_known(engine)
    request = engine.running[2]
    engine.memory.grow(request, len(request.pages) * PAGE_SIZE + 1, 0, 99)
    assert reported[1:] == [("on_alloc", request.request_id)]


def test_a_page_that_the_canary_knows_to_be_taken_is_refused(engine):
    """The engine's step ends in the canary's error, and no row of that step is longer for the canary."""
    _, taken, victim = engine.running
    rows = [list(engine.canary.session.ledger.request(request.request_id).pages) for request in engine.running]
    engine.allocator._free[0] = taken.pages[0]  # a heap still: lower than the others
    del engine.allocator._references[taken.pages[0]]
    with pytest.raises(PageStateError) as caught:
        finish(engine)
    assert (caught.value.page, caught.value.event) == (taken.pages[0], "granted")
    known = [engine.canary.session.ledger.request(request.request_id).pages for request in engine.running]
    assert [pages[: len(before)] for pages, before in zip(known, rows, strict=True)] == rows
    assert {len(pages) for pages in known} == {len(known[0])}
    assert victim in engine.running
