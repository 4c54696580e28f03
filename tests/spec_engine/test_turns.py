"""Who runs where the device has no room for all: everybody in turn, and nobody who would not fit."""

from __future__ import annotations

import pytest

from spec_engine.request import Request
from spec_engine.sampling import SamplingParams
from spec_engine.scheduling.turns import Turns

PAGES = {"a": 3, "b": 3, "c": 2, "d": 5}


@pytest.fixture
def requests() -> list[Request]:
    return [Request(name, [1], SamplingParams()) for name in PAGES]


def run(turns: Turns, requests: list[Request]) -> str:
    """One step; the names of those that ran."""
    chosen = turns.choose(requests, lambda request: PAGES[request.request_id])
    turns.ran(chosen)
    return "".join(request.request_id for request in chosen)


def test_requests_run_in_turns(requests):
    """Two steps each; whoever waited longest is first, and a smaller one fills what room is left."""
    turns = Turns(6, 2)
    assert [run(turns, requests) for _ in range(8)] == ["ab", "ab", "ac", "ac", "d", "d", "ab", "ab"]


def test_a_smaller_one_fills_the_room(requests):
    """Where one does not fit, the next that does is not held up by it."""
    turns = Turns(7, 2)
    assert [run(turns, requests) for _ in range(6)] == ["ab", "ab", "cd", "cd", "ab", "ab"]


def test_all_run_where_all_fit(requests):
    """Nobody waits."""
    turns = Turns(13, 2)
    assert {run(turns, requests) for _ in range(5)} == {"abcd"}


def test_the_others_stay_where_one_has_ended(requests):
    """In mid-turn whoever fits comes beside those that run, and nobody leaves."""
    turns = Turns(6, 4)
    assert run(turns, requests) == "ab"
    assert run(turns, requests[1:]) == "bc"
    assert run(turns, requests[1:]) == "bc"


def test_one_that_comes_later_gets_a_turn(requests):
    """It has waited longest, and still those that run finish their turn."""
    turns = Turns(5, 3)
    assert [run(turns, requests[:2]) for _ in range(2)] == ["a", "a"]
    assert [run(turns, requests) for _ in range(4)] == ["ac", "bc", "bc", "bc"]


def test_a_choice_changes_nothing(requests):
    """It may be asked for again, also of a part: pages are counted for it before it runs."""
    turns = Turns(6, 2)
    pages = [turns.choose(requests, lambda request: PAGES[request.request_id]) for _ in range(3)]
    assert pages[0] == pages[1] == pages[2] == turns.choose(pages[0], lambda request: PAGES[request.request_id])
