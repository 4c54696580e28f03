"""Published names travel in a thread; a store that fails ends nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from kvcanary.names import NameStore, Published
from kvcanary.names.published import MOST_WAITING

SPACE = "model a, seed 1"


class Broken:
    """A store that does not answer."""

    label = "nowhere"

    def _fail(self, *_: object) -> None:
        raise TimeoutError("no answer within 0.25 s")

    put = get = chain_of = spaces = _fail

    def close(self) -> None:
        """Nothing is open."""


def test_what_is_given_arrives(opened: Callable[[], NameStore]) -> None:
    """Another process finds it, and who gave it."""
    one = Published(opened, "worker 1")
    assert one.give(SPACE, lambda: [(3, 4), (5, 6)])
    one.settle()
    assert Published(opened, "worker 2").get(SPACE, [3]) == {3: {4: "worker 1"}}
    assert (one.put, one.lost) == (2, 0)
    one.give(SPACE, lambda: [(7, 8)])
    one.close()
    assert opened().chain_of(SPACE, 8) == 7


def test_a_store_that_fails_ends_nothing_and_is_told_once() -> None:
    """Names are lost and counted."""
    with capture_logs() as events:
        one = Published(Broken, "worker 1")  # type: ignore[arg-type]
        for _ in range(3):
            one.give(SPACE, lambda: [(3, 4)])
            one.settle()
        assert one.get(SPACE, [3]) == {}
        assert one.chain_of(SPACE, 3) is None
        one.expect_space(SPACE)
    assert (one.put, one.lost, one.unanswered) == (0, 3, 1)
    assert [(own["event"], own["error"]) for own in events] == [
        ("kvcanary.names_failed", "TimeoutError: no answer within 0.25 s")
    ]


def test_a_slow_store_makes_nobody_wait(opened: Callable[[], NameStore]) -> None:
    """What does not fit is lost, and counted."""
    one, may_go = Published(opened, "worker 1"), threading.Event()
    with capture_logs() as events:
        given = [one.give(SPACE, lambda: [(3, 4)] * may_go.wait(10)) for _ in range(MOST_WAITING + 5)]
    assert [own["event"] for own in events] == ["kvcanary.names_failed"]
    may_go.set()
    one.settle()
    assert given.count(False) == one.lost >= 4
    assert one.put == given.count(True)


@pytest.mark.parametrize(("kept", "is_told"), [(SPACE, False), ("model a, seed 2", True)])
def test_names_of_other_seeds_alone_are_told(opened: Callable[[], NameStore], kept: str, is_told: bool) -> None:
    """None of them will ever be compared: the sentence has both."""
    opened().put(kept, "worker 1", [(3, 4)])
    with capture_logs() as events:
        Published(opened, "worker 2").expect_space(SPACE)
    assert [(own["own"], own["others"]) for own in events] == ([(SPACE, [kept])] if is_told else [])
