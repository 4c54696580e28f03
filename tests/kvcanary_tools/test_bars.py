"""The page of goals: what the records hold, what is met, and why the rest is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcanary_tools.bench import bars


def test_the_page_quotes_the_records() -> None:
    """Its table and reasons are those of the records as they are."""
    assert "\n".join((bars.BEGIN, *bars.lines(), bars.END)) in bars.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("bar", bars.BARS, ids=lambda bar: bar.what)
def test_what_is_missed_has_a_reason(bar: bars.Bar) -> None:
    """A goal has one bound, and a figure beyond it is explained."""
    assert (bar.most is None) is not (bar.least is None)
    reached = bar.reached()
    assert reached is None or bar.is_met(reached) or bar.reason


def test_goals_are_met_or_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side of a bound; reasons stand once, behind the numbers of what is missed, or always told."""
    met = replace(bars.BARS[0], figure=lambda record: 0.9, least=0.9)
    missed = replace(met, figure=lambda record: 0.8999, digits=4, reason="slow.")
    above = replace(missed, figure=lambda record: 1.02, least=None, most=1.01)
    waiting = replace(above, record="gpu_of_tomorrow", is_always_shown=True)
    noted = replace(met, reason="as elsewhere.", is_always_shown=True)
    monkeypatch.setattr(bars, "BARS", (met, missed, above, waiting, noted))
    _, _, *rows, blank, reasons, notes = bars.lines()
    assert [row.split(" | ")[1:4] for row in rows] == [
        ["at least 0.9", "0.9", "met"],
        ["at least 0.9", "0.8999", "missed"],
        ["at most 1.01", "1.02", "missed"],
        ["at most 1.01", "no record yet", ""],
        ["at least 0.9", "0.9", "met"],
    ]
    assert (blank, reasons, notes) == ("", "- 2, 3: slow.", "- 5: as elsewhere.")


def test_a_row_that_is_not_measured_yet_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record says so, as one that is not there does; other figures stand."""
    monkeypatch.setattr(bars, "read", lambda name: {"rows": [{"batch": 1, "ratio": 0.5}]})
    one, other = (
        replace(bars.BARS[0], figure=lambda record, size=size: bars.row_of(record, batch=size)["ratio"])
        for size in (1, 64)
    )
    assert (one.reached(), other.reached()) == (0.5, None)


def test_a_draft_substep_may_take_four_microseconds_or_one_percent() -> None:
    """Whichever is more."""
    row = {"substep_added_us": {"rolling": {"median": 6.0}}, "substep_us": {"off": 300.0}}
    assert bars.substep_share(row) == 1.5
    assert bars.substep_share(row | {"substep_us": {"off": 600.0}}) == 1.0
