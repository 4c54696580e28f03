"""The periodic event: every so many steps the certificate's counters, as totals and as what was added."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from kvcanary import CanaryConfig
from kvcanary.calls.coverage import Coverage
from kvcanary.errors import CanaryConfigError
from kvcanary.report.stats import Stats
from kvcanary_tools.bench.toy.engine import ToyEngine


def events_of(stats: Stats, steps: range, coverage: Coverage, added: int = 10) -> list[dict]:
    """Tick once a step; each step checks so many slots."""
    with capture_logs() as events:
        for step in steps:
            coverage.slots_checked += added
            stats.tick(step, coverage)
    return events


def test_one_event_in_a_hundred_steps():
    """Steps 1 to 250 tell twice, at 100 and 200."""
    events = events_of(Stats(), range(1, 251), Coverage())
    assert [(e["event"], e["log_level"], e["step"], e["steps"]) for e in events] == [
        ("kvcanary.stats", "info", 100, 100),
        ("kvcanary.stats", "info", 200, 100),
    ]


def test_totals_grow_and_deltas_are_what_was_added():
    """Totals count from the start, deltas from the last event."""
    coverage = Coverage(slots_checked=7)
    coverage.skip("truth not known to the host", 3)
    events = events_of(Stats(every=5), range(1, 11), coverage)
    assert [e["totals"]["slots_checked"] for e in events] == [57, 107]
    assert [e["deltas"]["slots_checked"] for e in events] == [57, 50]
    assert [e["totals"]["unchecked"] for e in events] == [3, 3]
    assert [e["deltas"]["unchecked"] for e in events] == [3, 0]
    assert events[0]["deltas"].keys() == events[0]["totals"].keys() == coverage.totals().keys()


def test_levels_are_told_as_they_are():
    """What does not add up has no delta."""
    coverage = Coverage(peak_live_bytes=4096, max_unread_steps=17)
    (event,) = events_of(Stats(every=2), range(1, 3), coverage)
    assert (event["peak_live_bytes"], event["max_unread_steps"]) == (4096, 17)


def test_steps_that_are_skipped_delay_the_event():
    """A step number that is never reached does not silence the event for another hundred."""
    events = events_of(Stats(every=10), range(3, 40, 7), Coverage())
    assert [(e["step"], e["steps"]) for e in events] == [(10, 10), (24, 14), (38, 14)]


def test_tick_says_whether_it_told():
    """The caller may know."""
    stats = Stats(every=2)
    assert [stats.tick(step, Coverage()) for step in range(1, 5)] == [False, True, False, True]


def test_a_canary_tells_of_the_step_that_is_due():
    """Behind its check, with all that was read by then, and no sooner."""
    engine = ToyEngine(CanaryConfig(content="rolling"))
    with torch.inference_mode(), capture_logs() as events:
        engine.start("only", 6)
        while engine.canary.step < 199:
            engine.decode()
        reported = [event for event in events if event["event"] == "kvcanary.stats"]
        assert [(event["step"], event["steps"]) for event in reported] == [(100, 100)]
        engine.decode()
    assert events[-1]["step"] == 200
    assert events[-1]["totals"]["bytes_checked"] > reported[0]["totals"]["bytes_checked"] > 0


@pytest.mark.parametrize("every", [0, -1])
def test_every_must_be_a_step(every):
    """The error names value, rule and remedy."""
    with pytest.raises(CanaryConfigError) as caught:
        Stats(every)
    assert str(caught.value) == f"every must be at least 1 step, got {every}: leave Stats out to tell nothing"
