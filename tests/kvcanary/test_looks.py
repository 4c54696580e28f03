"""Looks that travel with a step: each has its answer there, and nobody waits for one before."""

from __future__ import annotations

from functools import partial

import torch

from kvcanary.hits import Hit
from kvcanary.looks import MOST_LOOKS, Looks

CPU = torch.device("cpu")


def judge(number: int, judged: list[int]) -> list[Hit]:
    judged.append(number)
    return []


def test_as_many_looks_as_a_batch_has_requests_go_with_one_step():
    """Each answer lies in its own place, and those alone are judged that differ, once the step is heard."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    num_looks, differing = 300, {0, 17, 299}
    for number in range(num_looks):
        mismatch = torch.tensor([[0, 0], [0, int(number in differing)]])
        assert looks.ask(mismatch, partial(judge, number, judged)) == []
    assert (looks.waits, judged) == (True, [])
    sent = looks.send()
    assert sent is not None
    sent.hits()
    assert (looks.waits, set(judged)) == (False, differing)


def test_a_step_that_finds_nothing_forgets_what_the_last_one_found():
    """Places are taken again from the first on, whatever lay there."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    for number, mismatch in enumerate((torch.ones(1, 2), torch.zeros(1, 2))):
        looks.ask(mismatch.long(), partial(judge, number, judged))
        sent = looks.send()
        assert sent is not None
        sent.hits()
    assert judged == [0]


def test_looks_behind_the_last_place_are_judged_at_once():
    """Nothing is skipped where a step has more of them than places."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    for number in range(MOST_LOOKS + 1):
        looks.ask(torch.ones(1, 2, dtype=torch.int64), partial(judge, number, judged))
    assert judged == [MOST_LOOKS]
