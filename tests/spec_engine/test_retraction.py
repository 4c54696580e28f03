"""Who is sent back to the queue, in which order, and when it stops."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_engine.scheduling.retraction import new_token_ratio, plan_retraction, victims


@dataclass
class Running:
    """A running request, as far as its retraction goes; equal ones are still two."""

    output_len: int = 0
    prompt_len: int = 0
    priority: int = 0
    pages: int = 1


REQUESTS = st.lists(
    st.builds(Running, st.integers(0, 3), st.integers(0, 3), st.integers(-1, 1), st.integers(1, 4)), max_size=6
)


def identities(requests) -> list[int]:
    return [id(request) for request in requests]


def test_the_fewest_outputs_go_first_and_of_those_the_longest_prompt():
    """What is lost least, and what gives back most."""
    long, short, old = Running(2, 90), Running(2, 10), Running(7, 99)
    assert identities(victims([old, short, long])) == identities([long, short, old])


def test_priority_stands_in_front():
    """A request of lower priority goes first, however much it has put out."""
    low, high = Running(50, 1, priority=-1), Running(0, 99, priority=3)
    assert identities(victims([high, Running(3, 3), low])[::2]) == identities([low, high])


def test_of_equal_requests_the_latest_goes_first():
    """The one that came first is not overtaken by its equals."""
    first, second = Running(1, 1), Running(1, 1)
    assert identities(victims([first, second])) == identities([second, first])


def test_at_least_one_goes_and_no_more_than_needed():
    """A plan is asked for when the step does not fit; the second victim is enough here."""
    requests = [Running(output_len=n) for n in range(5)]
    plan = plan_retraction(requests, lambda kept, retracted: True)
    assert (identities(plan.retracted), plan.aborted) == (identities(requests[:1]), None)
    plan = plan_retraction(requests, lambda kept, retracted: len(retracted) >= 2)
    assert identities(plan.retracted) == identities(requests[:2])
    assert identities(plan.kept) == identities(requests[2:])


def test_the_last_one_is_never_retracted():
    """It would be admitted again and not fit again: it stays if it fits alone, else it is aborted."""
    requests = [Running(output_len=2), Running(output_len=1)]
    plan = plan_retraction(requests, lambda kept, retracted: len(kept) == 1)
    assert (identities(plan.kept), identities(plan.retracted)) == (identities(requests[:1]), identities(requests[1:]))
    plan = plan_retraction(requests, lambda kept, retracted: False)
    assert (plan.kept, identities(plan.retracted), plan.aborted is requests[0]) == ([], identities(requests[1:]), True)
    alone = plan_retraction(requests[:1], lambda kept, retracted: True)
    assert (identities(alone.kept), alone.retracted, alone.aborted) == (identities(requests[:1]), [], None)
    assert plan_retraction(requests[:1], lambda kept, retracted: False).aborted is requests[0]


def test_without_requests_nothing_happens():
    """An empty step fits."""
    plan = plan_retraction([], lambda kept, retracted: False)
    assert (plan.kept, plan.retracted, plan.aborted) == ([], [], None)


@given(REQUESTS, st.integers(0, 12))
def test_a_plan_keeps_as_many_as_fit(requests, available):
    """Everybody is kept, retracted or aborted once; what is kept fits, and with the last victim it would not have."""

    def fits(kept, retracted):
        return sum(request.pages for request in kept) <= available

    plan = plan_retraction(requests, fits)
    aborted = [] if plan.aborted is None else [plan.aborted]
    assert sorted(identities([*plan.kept, *plan.retracted, *aborted])) == sorted(identities(requests))
    assert identities(plan.retracted) == identities(victims(requests))[: len(plan.retracted)]
    assert identities(plan.kept) == [i for i in identities(requests) if i in identities(plan.kept)]
    assert fits(plan.kept, plan.retracted)
    if len(plan.retracted) > 1:
        assert not fits([*plan.kept, *aborted, plan.retracted[-1]], plan.retracted[:-1])
    if len(requests) > 1:
        assert plan.retracted


@pytest.mark.parametrize(
    ("output_lens", "max_new", "expected"),
    [([10, 20], [100, 100], 70 / 201), ([], [], 0.0), ([90], [100], 1.0), ([0], [399], 0.05)],
)
def test_the_ratio_expects_what_was_decoded_and_twenty_tokens_more(output_lens, max_new, expected):
    """(sum of outputs + 20 n) / (sum of max_new_tokens + 1), never more than all of it."""
    assert new_token_ratio(output_lens, max_new) == expected
