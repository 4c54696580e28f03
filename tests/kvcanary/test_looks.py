"""Looks that travel with a step: each has its answer there, and nobody waits for one before."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from kvcanary.beside import LAST, Beside
from kvcanary.hits import Hit
from kvcanary.looks import ROOM, Looks, Sent
from kvcanary.outbox import IN_THE_AIR, LINES

CPU = torch.device("cpu")


def judge(number: int, judged: list[int]) -> list[Hit]:
    judged.append(number)
    return []


def asked(looks: Looks, differs: bool, number: int, judged: list[int], count: int = 2) -> torch.Tensor:
    """A look whose kernel says in the last of its numbers whether it has found something."""
    found = looks.room(count)
    assert not found.any()
    found[-1] = int(differs)
    looks.ask(found, partial(judge, number, judged))
    return found


def sent_of(looks: Looks) -> Sent:
    sent = looks.send()
    assert sent is not None
    return sent


def test_as_many_looks_as_a_batch_has_requests_go_with_one_step():
    """Each answer lies in its own place, and those alone are judged that differ, once the step is heard."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    differing = {0, 17, 299}
    for number in range(300):
        asked(looks, number in differing, number, judged)
    assert (looks.waits, judged) == (True, [])
    sent_of(looks).hits()
    assert (looks.waits, set(judged), looks.send()) == (False, differing, None)


@pytest.mark.parametrize("differing", [0, 1, 2])
def test_what_a_line_has_no_room_for_lies_in_another_block(differing):
    """Nothing is skipped, moved or overwritten where a step has more of them than places."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    told = [looks.tell(np.full(count, count)) for count in (ROOM - 3, 7, 5 * ROOM)]
    found = [asked(looks, number == differing, number, judged, count) for number, count in enumerate((ROOM, 1, 9999))]
    sent_of(looks).hits()
    assert judged == [differing]
    assert [len(numbers) for numbers in told] == [int(numbers.max()) for numbers in told]
    assert [int(own.sum()) for own in found] == [int(number == differing) for number in range(3)]


def test_a_step_that_finds_nothing_forgets_what_the_last_one_found():
    """Places are taken again from the first on, whatever lay there."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    for number in range(3 * IN_THE_AIR):
        asked(looks, number < IN_THE_AIR, number, judged)
        sent_of(looks).hits()
    assert judged == list(range(IN_THE_AIR))


def test_numbers_between_answers_say_nothing():
    """What a finding has left in a place that is given away with another's is no finding."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    for _ in range(LINES):
        asked(looks, True, 0, judged, 4).fill_(1)
        sent_of(looks).hits()
    asked(looks, False, 1, judged, 1)
    asked(looks, False, 1, judged, 1)
    sent = sent_of(looks)
    assert sent.line.found.are_zero()
    assert (sent.hits(), judged) == ([], [0] * LINES)


@pytest.mark.parametrize("differing", range(IN_THE_AIR + 1))
def test_answers_stay_until_the_step_is_heard(differing):
    """Kernels answer beside later steps: what is told and asked for meanwhile lies elsewhere."""
    looks, judged = Looks(CPU, at_once=False), list[int]()
    flights, places, told = [], [], []
    for number in range(IN_THE_AIR):
        told.append(looks.tell(np.array([number])))
        places.append(asked(looks, False, number, judged))
        flights.append(sent_of(looks))
    told.append(looks.tell(np.array([IN_THE_AIR])))
    places.append(asked(looks, False, IN_THE_AIR, judged))
    places[differing].fill_(1)
    flights.append(sent_of(looks))
    for sent in flights:
        sent.hits()
    assert (judged, torch.cat(told).tolist()) == ([differing], list(range(IN_THE_AIR + 1)))


def test_a_step_allocates_nothing_once_lines_have_grown():
    """The same memory is given away every time that a line's turn comes."""
    looks, judged = Looks(CPU, at_once=False), list[int]()

    def addresses() -> set[int]:
        found = set[int]()
        for number in range(IN_THE_AIR + 1):
            place = asked(looks, False, number, judged, 3 * ROOM)
            found |= {place.data_ptr(), looks.tell(np.zeros(5 * ROOM, np.int64)).data_ptr()}
            sent_of(looks).hits()
        return found

    assert len(addresses()) == 2 * (IN_THE_AIR + 1)
    assert addresses() == addresses()


@pytest.mark.gpu
@pytest.mark.parametrize("differing", [0, 1])
def test_the_next_step_asks_before_the_last_one_is_answered(differing):
    """A page is granted, and its poison looked at, while bytes of the step before are still being read beside it."""
    device, judged = torch.device("cuda"), list[int]()
    looks, beside = Looks(device, at_once=False), Beside(device, LAST)
    answers = [torch.full((2,), int(number == differing), device=device) for number in range(2)]
    with beside.behind():
        torch.cuda._sleep(20_000_000)
        asked(looks, False, 0, judged).copy_(answers[0], non_blocking=True)
        first = sent_of(looks)
    asked(looks, False, 1, judged).copy_(answers[1], non_blocking=True)
    with beside.behind():
        second = sent_of(looks)
    torch.cuda.synchronize()
    for sent in (first, second):
        sent.hits()
    assert judged == [differing]
