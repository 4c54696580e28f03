"""What a step costs the host: by its rows, and not by the pool in which they lie."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from fake_engine import FakeEngine
from kvcanary.ledger.page_states import Pages
from kvcanary.manager.hook_clock import HookClock
from kvcanary.native.layout import PAGES
from kvcanary.recorder.checkpoint import take_checkpoint
from kvcanary.scrub.scrubber import STRIDE
from kvcanary_kernels.record.layout import FREE, RESERVED, WRITTEN

SMALL, LARGE = 1 << 11, 1 << 18  # pages of one slot
TIMES = 12


def microseconds(*engines: FakeEngine) -> list[float]:
    """Of the canary's hooks in a step of each; of each of STRIDE steps the least of some times, by turns."""
    clocks = [HookClock(engine.canary) for engine in engines]
    least = np.full((len(engines), STRIDE), np.inf)
    for step in range(TIMES * STRIDE):
        for number, (engine, clock) in enumerate(zip(engines, clocks, strict=True)):
            clock.seconds = 0.0
            engine.decode()
            least[number, step % STRIDE] = min(least[number, step % STRIDE], 1e6 * clock.seconds)
    return least.mean(1).tolist()


@pytest.fixture
def make_decoding(make_engine: Callable[..., FakeEngine]) -> Callable[..., FakeEngine]:
    """An engine whose rows are in decode, over pages of one slot, so that every step is granted some."""

    def make(num_pages: int, rows: int = 1, tokens: int = 100) -> FakeEngine:
        engine = make_engine(page_size=1, num_pages=num_pages, layers=1, heads=1, head_dim=2)
        for row in range(rows):
            engine.start(f"row {row}", tokens)
        for _ in range(8):
            engine.decode()
        return engine

    return make


def test_a_step_costs_as_much_in_a_large_pool(make_decoding: Callable[..., FakeEngine]) -> None:
    """A pool of 128 times as many pages, and the same rows: less than half as much again."""
    small, large = microseconds(make_decoding(SMALL), make_decoding(LARGE))
    assert large < 1.5 * small, (small, large)


@pytest.mark.parametrize("more", [{"rows": 8}, {"tokens": 800}])
def test_a_step_costs_at_most_its_share_of_rows_and_tokens(
    make_decoding: Callable[..., FakeEngine], more: dict[str, int]
) -> None:
    """Eight times the rows, or eight times the tokens in one, cost at most eight times as much."""
    one, many = microseconds(make_decoding(SMALL * 8), make_decoding(SMALL * 8, **more))
    assert many < 8 * one, (one, many)


def test_a_large_pool_begins_no_segment_in_every_step(make_decoding: Callable[..., FakeEngine]) -> None:
    """The state that a recording begins with may take most of its bytes: steps follow it all the same."""
    engine = make_decoding(SMALL)
    recorder = engine.canary.recorder
    most_bytes = 2 * recorder.segments[-1].start_bytes
    recorder.stop()
    recorder.most_bytes = most_bytes
    recorder.start(engine.canary.step)
    begun = set()
    for _ in range(64):
        engine.decode()
        begun.add(recorder.segments[-1].checkpoint.step)
        assert recorder.num_bytes <= recorder.most_bytes
    assert len(begun) < 16


def test_a_checkpoint_holds_no_more_objects_for_more_tokens(make_decoding: Callable[..., FakeEngine]) -> None:
    """Of a row that has grown by forty steps it keeps as many objects as before: the collector has no more to visit."""
    engine = make_decoding(SMALL)

    def tracked() -> int:
        checkpoint = take_checkpoint(engine.canary.recorder.manager_state, engine.canary.step, None)
        seen, new = set(), [checkpoint.requests]
        while new:
            one = new.pop()
            if id(one) not in seen and gc.is_tracked(one) and not isinstance(one, type):
                seen.add(id(one))
                new += gc.get_referents(one)
        return len(seen)

    before = tracked()
    for _ in range(40):
        engine.decode()
    assert tracked() == before


def test_changes_are_the_pages_of_events() -> None:
    """As many as were told, each since the last time; of very many, those that are there."""
    pages = Pages(LARGE, 1)
    assert not pages.changed
    assert not len(pages.changes())
    pages.advance("granted", np.array([3, 5]), 1, "one", uid=7)
    pages.wrote(np.array([3]))
    pages.wrote(np.array([5]))
    assert pages.changed
    assert pages.changes().tolist() == [3, 5, 3, 5]
    pages.states[5] = RESERVED
    assert not pages.changed
    pages.advance("granted", np.array([9, 7, 8]), 1, "one", uid=7)
    pages.wrote(4 * np.array([9, 7, 7, 6]) + [0, 3, 1, 2], 4)  # nobody has granted 6
    assert pages.changes().tolist() == [9, 7, 8, 9, 7]
    assert [int(pages.states[page]) for page in (9, 7, 8, 6)] == [WRITTEN, WRITTEN, RESERVED, FREE]
    for _ in range(10_000):
        pages.states[3] = pages.states[5]  # RESERVED: it may be written again
        pages.wrote(np.array([3]))
    assert set(pages.changes().tolist()) == {3}
    pages.published[[5, 9]] = True
    pages.changed_everywhere()
    assert pages.changes().tolist() == list(range(LARGE))
    assert pages.struct[PAGES.num_published] == 2
