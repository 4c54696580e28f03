"""Turns: a share of a fleet's workers is watched at a time, and everybody has a turn."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from structlog.testing import capture_logs

from kvcanary.hardware.turns import WEEK, has_turn, turn_of

MONDAY = datetime(2026, 11, 23, tzinfo=UTC)


@pytest.mark.parametrize(("share", "weeks"), [(0.05, 20), (0.3, 4), (0.5, 2)])
def test_everybody_has_a_turn_and_about_a_share_at_a_time(share: float, weeks: int) -> None:
    """500 GPUs: within 1 / share weeks each was watched, in each week about a share of them."""
    fleet = [{"hostname": f"n{n // 8}", "gpu_uuid": f"GPU-{n:08x}"} for n in range(500)]
    watched = [[has_turn(share, own, now=MONDAY + week * WEEK) for own in fleet] for week in range(weeks)]
    assert all(any(turns) for turns in zip(*watched, strict=True))
    assert all(abs(sum(turns) - 500 * share) < 4 * (500 * share * (1 - share)) ** 0.5 for turns in watched)


def test_a_turn_lasts_a_week_and_says_so() -> None:
    """From Monday to Sunday in UTC; one event, with who, which share and which week."""
    here = {"hostname": "node17", "pid": 1}
    with capture_logs() as events:
        turns = {has_turn(0.5, here, 3, MONDAY + timedelta(hours=hours)) for hours in range(0, 7 * 24, 5)}
    assert len(turns) == 1
    [event] = [dict(own) for own in events][:1]
    assert event == {
        "event": "kvcanary.turn", "log_level": "info", "watched": turns.pop(), "rank": 3, "hardware": here,
        "share": 0.5, "week": "2026-W48",
    }  # fmt: skip
    assert turn_of(0.5, MONDAY) == {"share": 0.5, "week": "2026-W48"}


def test_ranks_of_a_host_without_uuids_have_turns_of_their_own() -> None:
    """A worker on a CPU is known by host and rank."""
    turns = [[has_turn(0.25, {"hostname": "n"}, rank, MONDAY + week * WEEK) for week in range(8)] for rank in range(8)]
    assert len({tuple(own) for own in turns}) > 2


def test_all_are_watched_without_a_word() -> None:
    """A share of 1 is no share."""
    with capture_logs() as events:
        assert has_turn(1, {"hostname": "n"})
    assert events == []
